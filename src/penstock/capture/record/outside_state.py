"""State of Python that forward may use besides tensors: random numbers, globals, containers.

random.random(), np.random.rand()    all stages draw the same: seeded for each micro-batch
self.steps += 1                      kept for each stage (`penstock.capture.forward.kept_state`)
self.history.append(x)               would be done by every stage of a process: refused
STEPS += 1 (a global)                the same
"""

import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from inspect import getclosurevars
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn

from penstock.capture.batch.unread import StandIn
from penstock.capture.record.model_state import OF_EVERY_MODULE, PLAIN
from penstock.device import generator_state, put_generator_state

GeneratorsState = tuple[Any, Any]
"""The states of ``random`` and of ``numpy.random``."""

RandomState: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""The states of torch's generators: of the CPU, and of a device that is a GPU."""

_CONTAINERS = (list, dict, set, deque)
_DEEPEST, _LONGEST = 3, 1000


def generators_state() -> GeneratorsState:
    """The states of the generators outside of torch."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def restore_generators(state: GeneratorsState) -> None:
    """Put the generators into a state."""
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def seed_generators(seed: int) -> None:
    """Seed the generators outside of torch."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def random_state(device: torch.device) -> RandomState:
    """The states of torch's generators: of the CPU, and of ``device`` if it is a GPU."""
    return torch.get_rng_state(), generator_state(device)


def same_state(before: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor | None]) -> bool:
    """Return whether the states are equal, so no random number was drawn in between."""
    pairs = zip(before, after, strict=True)
    return all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)


def restore_random_state(device: torch.device, state: RandomState) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state[0])
    put_generator_state(device, state[1])


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore all generators on exit; random numbers may be drawn meanwhile."""
    state, plain = random_state(device), generators_state()
    try:
        yield
    finally:
        restore_random_state(device, state)
        restore_generators(plain)


def same_generators(one: GeneratorsState, other: GeneratorsState) -> bool:
    """Return whether nothing was drawn between two states."""
    return repr(one) == repr(other)


def contents_of(value: Any, depth: int = 0) -> Any:
    """Return a fingerprint of a container or generator to detect changes in place, else None."""
    kind = type(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if kind.__module__.startswith("numpy.random"):
        generator = getattr(value, "bit_generator", value)
        return repr(getattr(generator, "state", generator))
    if kind not in _CONTAINERS or depth >= _DEEPEST or len(value) > _LONGEST:
        return None
    entries = [own for pair in value.items() for own in pair] if kind is dict else list(value)
    found = [_entry(entry, depth) for entry in entries]
    return (len(found), *(sorted(found, key=repr) if kind is set else found))


def _entry(value: Any, depth: int) -> Any:
    if isinstance(value, PLAIN):
        return repr(value)  # a NaN is not equal to itself
    inner = contents_of(value, depth + 1)
    return id(value) if inner is None else inner


def containers_in(value: Any, depth: int = 0) -> Iterator[int]:
    """The sizes, and the entries' identities, of lists, dicts and objects in arguments.

    They show the changes that a unit makes.
    """
    if isinstance(value, (torch.Tensor, nn.Module, StandIn, *PLAIN)):
        return
    if isinstance(value, list | tuple | dict):
        entries = list(value.values() if isinstance(value, dict) else value)
        yield len(entries)
        yield from map(id, entries)
        for entry in entries if depth < 2 else ():
            yield from containers_in(entry, depth + 1)
    elif hasattr(value, "__dict__") and not callable(value) and depth < 3:
        yield from containers_in(vars(value), depth + 1)


def holds_tensors(value: Any, depth: int = 0) -> bool:
    """Return whether an object holds tensors: in attributes, containers or a closure."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (nn.Module, StandIn, *PLAIN)) or depth > _DEEPEST:
        return False
    entries: list[Any] = [*getattr(value, "__dict__", {}).values()]
    entries += (getattr(value, name, None) for name in getattr(value, "__slots__", ()))
    if isinstance(value, FunctionType):
        with suppress(ValueError):  # a variable that has no value yet
            entries += getclosurevars(value).nonlocals.values()
    elif isinstance(value, partial):
        entries += value.func, *value.args, *value.keywords.values()
    elif isinstance(value, dict):
        entries += value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        entries += value
    return any(holds_tensors(entry, depth + 1) for entry in entries)


class Globals:
    """Numbers and containers of the user's Python modules: those of the classes in ``model``.

    Also of that of the function ``loss``, and containers that it holds in its closure.
    """

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        names = {type(part).__module__ for part in model.modules()}
        names |= {getattr(loss, "__module__", "")}
        outside = ("torch", "penstock", "builtins")
        self._spaces: dict[str, dict[str, Any]] = {
            name: vars(sys.modules[name])
            for name in sorted(names)
            if name in sys.modules and name.partition(".")[0] not in outside
        }
        with suppress(TypeError, ValueError):  # no function; or what it holds is not there yet
            self._spaces["closure"] = dict(getclosurevars(loss).nonlocals)
        self._kept = [
            (space, name, value, value.copy() if type(value) in _CONTAINERS else None, own)
            for space, name, value, own in self._watched()
        ]

    def _watched(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield space, name, value, and the fingerprint that detects a change."""
        for space, held in self._spaces.items():
            for name, value in list(held.items()):
                own = repr(value) if isinstance(value, PLAIN) else contents_of(value)
                if own is not None and not name.startswith("__"):
                    yield space, name, value, own

    def state(self) -> dict[str, Any]:
        """Return the fingerprints that detect changes, by name."""
        return {f"{space}.{name}": own for space, name, _, own in self._watched()}

    def restore(self) -> None:
        """Put back what was there at first."""
        for space, name, value, copied, own in self._kept:
            self._spaces[space][name] = value
            if copied is not None and contents_of(value) != own:
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(copied)


def contents_in(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return a fingerprint of each container in an attribute of these modules, by name."""
    found: dict[str, Any] = {}
    for path, module in modules.items():
        for key, value in module.__dict__.items():
            if key not in OF_EVERY_MODULE:
                own = contents_of(value)
                if own is not None:
                    found[f"{path}.{key}".lstrip(".")] = own
    return found


def changed_name(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first name whose value is another; empty if there is none."""
    changed = (name for name, own in after.items() if name in before and own != before[name])
    return next(changed, "")
