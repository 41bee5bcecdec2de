"""Finds what a model's Python code changes besides tensors of the graph: counters, lists, flags.

    self.step += 1              a captured graph would always hold the first value: refused
    self.last = h               harmless, unless the next call reads it

Attributes of the modules, and numbers and containers in the user's Python modules, are compared
before and after tracing, and are restored. If a number or a flag has changed, the model is refused
with the line. If something else has changed, the model runs twice in a row on the example batch; if
the first run changes the loss of the second, the model is refused too. Tensors that code assigns to
buffers are written into the buffers.
"""

import contextlib
import linecache
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from penstock.capture.capture_errors import REMEDY
from penstock.capture.chance import python_modules
from penstock.capture.torch_calls import replaced
from penstock.capture.training_flags import kept_buffers_of
from penstock.errors import CaptureFailed

__all__ = ["StateChange", "check_changes", "kept_python_state"]

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_HARMLESS = frozenset(["_output_capturing_hooks_installed"])
"""Notes of transformers about its own hooks, which stay."""
# Exactly these types: containers of other classes may do more than hold values.
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict)
_PLAIN = (bool, int, float, str, bytes, type(None))
_DEEPEST = 3
_LONGEST = 1000
TOLERANCE = 1e-6


@dataclass(frozen=True)
class StateChange:
    """Something that forward has changed; ``line`` is where, if known."""

    name: str
    line: str
    is_number: bool


class _State:
    """The state of the modules and of the user's Python modules, and its changes."""

    def __init__(self, model: nn.Module) -> None:
        self.changes: list[StateChange] = []
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._buffers: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self._assigned: dict[tuple[int, str], tuple[str, int]] = {}
        self._holders: list[tuple[int, str, dict[str, Any]]] = [
            (id(part), f"{type(model).__name__}{f'.{name}' if name else ''}", vars(part))
            for name, part in model.named_modules()
        ]
        self._holders += [(id(m), m.__name__, vars(m)) for m in python_modules(model)]
        self._attributes = {owner: dict(held) for owner, _, held in self._holders}
        self._before = self._prints()

    def _prints(self) -> dict[tuple[int, str], Any]:
        """A value to compare for everything that is watched."""
        known: dict[tuple[int, int], Any] = {}
        found: dict[tuple[int, str], Any] = {}
        for owner, _, held in self._holders:
            of_python = "__name__" in held
            for name, value in list(held.items()):
                if name in _OF_TORCH or (of_python and not _is_state(name, value)):
                    continue
                found[owner, name] = self._print(value, known, 0)
        return found

    def _print(self, value: Any, known: dict[tuple[int, int], Any], depth: int) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, torch.Tensor):
            return id(value), value._version
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return id(value), None
        # By depth too: deeper down less of the same object is printed.
        key = id(value), depth
        if key in known:
            return known[key]
        known[key] = found = id(value)
        if isinstance(value, random.Random):
            found = value.getstate()
        elif isinstance(value, np.random.Generator):
            found = repr(value.bit_generator.state)
        elif isinstance(value, np.ndarray):
            found = (value.shape, value.tobytes() if value.size < _LONGEST else id(value))
        elif depth < _DEEPEST:
            held = _contents(value)
            if held is not None and len(held) < _LONGEST:
                self._copies.setdefault(id(held), (held, _copied(held)))
                found = self._prints_of(held, known, depth)
        known[key] = found
        return found

    def _prints_of(self, held: Any, known: dict[tuple[int, int], Any], depth: int) -> Any:
        if isinstance(held, dict):
            pairs = ((repr(k), self._print(v, known, depth + 1)) for k, v in held.items())
            return tuple(sorted(pairs, key=lambda pair: pair[0]))
        entries = [self._print(entry, known, depth + 1) for entry in held]
        return tuple(sorted(entries, key=repr) if isinstance(held, set | frozenset) else entries)

    def note(self, module: nn.Module, name: str) -> None:
        """Remember the line that assigns an attribute."""
        frame = sys._getframe(2)
        if id(module) in self._attributes:
            self._assigned[id(module), name] = (frame.f_code.co_filename, frame.f_lineno)
        before = vars(module).get("_buffers", {}).get(name)
        if before is not None and get_proxy_mode() is not None:
            self._buffers.setdefault((module, name), before)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Collect the changes when forward itself ends; torch restores some things later."""
        yield
        self._write_buffers()
        with torch._C.DisableTorchFunction():
            self.changes = self._changes(self._prints())

    def _write_buffers(self) -> None:
        """Write tensors assigned to buffers into them; torch does so for the outermost module."""
        for (module, name), before in self._buffers.items():
            value = module._buffers[name]
            if value is before:
                continue
            if value is None or value.shape != before.shape or value.dtype != before.dtype:
                found = StateChange(f"buffer {name!r} of {type(module).__name__}", "", False)
                raise _refused(found, "gives it another shape or type")
            before.copy_(value.detach())
        self._buffers.clear()

    def _changes(self, now: dict[tuple[int, str], Any]) -> list[StateChange]:
        labels = {owner: label for owner, label, _ in self._holders}
        found: list[StateChange] = []
        for key in {**self._before, **now}:
            before, after = self._before.get(key), now.get(key)
            if before == after and (key in now) == (key in self._before):
                continue
            owner, name = key
            if name in _HARMLESS:
                continue
            is_number = all(isinstance(v, bool | int | float) for v in (before, after))
            tensor = key in self._before and isinstance(self._attributes[owner][name], torch.Tensor)
            found.append(
                StateChange(f"{labels[owner]}.{name}", self._line(key), is_number and not tensor)
            )
        return found

    def _line(self, key: tuple[int, str]) -> str:
        if key not in self._assigned:
            return ""
        file, number = self._assigned[key]
        return f"{file}:{number} `{linecache.getline(file, number).strip()}`"

    def restore(self) -> None:
        """Restore everything."""
        for held, before in self._copies.values():
            if _differs(held, before):
                _refill(held, before)
        for owner, _, held in self._holders:
            before = self._attributes[owner]
            watched = {name for at, name in self._before if at == owner}
            for name in [
                n for n in held if n not in {*before, *_HARMLESS} and "__name__" not in held
            ]:
                del held[name]
            for name in watched:
                if held.get(name) is not before[name]:
                    held[name] = before[name]


def _is_state(name: str, value: Any) -> bool:
    """Whether a global variable of a Python module may be state of the model."""
    kinds = (bool, int, float, *_CONTAINERS)
    return not name.startswith("__") and type(value) in kinds


def _contents(value: Any) -> Any:
    """The contents of ``value``: itself for a container, else the attributes of an object."""
    if type(value) in _CONTAINERS:
        return value
    others = (type, ModuleType, nn.Module, dict, list, set, tuple)
    if isinstance(value, others) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return vars(value)


def _copied(held: Any) -> Any:
    return held if isinstance(held, tuple | frozenset) else held.copy()


def _differs(held: Any, before: Any) -> bool:
    if len(held) != len(before):
        return True
    if isinstance(held, dict):
        return any(k not in held or held[k] is not v for k, v in before.items())
    if isinstance(held, set | frozenset):
        return held != before
    return any(one is not other for one, other in zip(held, before, strict=True))


def _refill(held: Any, before: Any) -> None:
    held.clear()
    held.extend(before) if isinstance(held, list | deque) else held.update(before)


@contextlib.contextmanager
def kept_python_state(model: nn.Module) -> Iterator[_State]:
    """Within, the Python state of ``model`` may change; it is restored afterwards."""
    state = _State(model)
    assign = nn.Module.__setattr__

    def noting(self: nn.Module, name: str, value: Any) -> None:
        state.note(self, name)
        assign(self, name, value)

    try:
        with replaced(nn.Module, "__setattr__", noting):
            yield state
    finally:
        state.restore()


def check_changes(
    changes: Sequence[StateChange], module: nn.Module, leaves: Sequence[torch.Tensor]
) -> None:
    """Refuse changes that a captured graph would not make; ``module`` computes the loss.

    Raises:
        CaptureFailed: a number has changed, or the loss depends on what an earlier call left.
    """
    for change in changes:
        if change.is_number:
            raise _refused(change, "changes it in every call")
    if changes and any(leaf.is_meta for leaf in leaves):
        return
    if changes and not _same_twice(module, leaves):
        raise _refused(changes[0], "leaves something there on which its next result depends")


def _refused(change: StateChange, what: str) -> CaptureFailed:
    at = f" at {change.line}" if change.line else ""
    return CaptureFailed(
        f"{change.name} cannot be captured: forward {what}{at}, and a captured model would keep "
        "the value of its first call; keep it in a buffer (register_buffer) that tensor operations "
        f"update, change it outside of forward, or {REMEDY}"
    )


def _same_twice(module: nn.Module, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether two calls in a row, with equal buffers and random numbers, give the same loss."""
    losses: list[float] = []
    with kept_python_state(module):
        for _ in range(2):
            with kept_buffers_of(module), torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(0)
                losses.append(float(module(*(leaf.clone() for leaf in leaves))[0]))
    one, other = losses
    return abs(one - other) <= TOLERANCE * abs(one) or (one != one and other != other)
