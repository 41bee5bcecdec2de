"""Modules that are kept whole, because tracing would write out a loop of theirs.

    for word in range(2048): state = decay * state + ...      one operator instead of 16,384

Recurrences without a kernel (Mamba, RWKV, chunks of linear attention) are such loops.
`OwnOperators` counts while a model is traced; where one call of a module makes too many operators
of its own, the model is traced again with the modules of that class kept whole
(`penstock.capture.opaque`). Their parameters are arguments of the call, so a stage gives them, and
finds their gradients.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from penstock.capture.learned_shapes import learned
from penstock.capture.opaque import OpaqueTable, active_table, call_opaquely, refused
from penstock.capture.replaced import replaced
from penstock.errors import PenstockError

__all__ = ["OwnOperators", "keeping_modules"]

PLAIN_CALL: Any = nn.Module._wrapped_call_impl
"""What tracing replaces; it would take modules whose calls fail for running still."""

LIMIT = 300
"""Operators that one call of a module may make itself, those of its submodules not counted.

Counted are calls of torch, sizes and types too. BigBird's block-sparse attention makes 240 and
Longformer's 176, without such a loop; a decoder's attention makes 26 to 60.
"""

EVERY = 20
"""Stacks are looked at after so many operators."""


class OwnOperators(TorchFunctionMode):
    """Stops tracing when a module of a class not in ``unlimited`` makes too many operators.

    ``found`` is the class then.
    """

    def __init__(self, model: nn.Module, unlimited: Collection[type[nn.Module]]) -> None:
        super().__init__()
        self.found: type[nn.Module] | None = None
        self._classes = {id(part.__dict__): type(part) for part in model.modules()}
        self._top = id(model.__dict__)
        self._unlimited = unlimited
        self._operators = 0
        self._counts: dict[FrameType, int] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count, and run ``func``."""
        self._operators += 1
        if self._operators % EVERY == 0:
            self._look(sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _look(self, frame: FrameType | None) -> None:
        """Count for the innermost module; forget calls that have returned."""
        calls: dict[FrameType, int] = {}
        innermost: FrameType | None = None
        own = 0
        while frame is not None:
            known = id(getattr(frame.f_locals.get("self"), "__dict__", None))
            if known in self._classes:
                if innermost is None or known == own:
                    innermost, own = frame, known
                calls[frame] = self._counts.get(frame, 0)
            frame = frame.f_back
        self._counts = calls
        if innermost is None or own == self._top:
            return
        calls[innermost] += EVERY
        kind = self._classes[own]
        if calls[innermost] > LIMIT and kind not in self._unlimited:
            self.found = kind
            raise TooManyOperators(kind.__name__)


class TooManyOperators(Exception):
    """Ends a trace that will be made again."""


@contextlib.contextmanager
def keeping_modules(
    model: nn.Module,
    kinds: Collection[type[nn.Module]],
    table: OpaqueTable,
    failed: list[type[nn.Module]],
) -> Iterator[None]:
    """Record each call of a module of ``kinds`` in ``table`` while ``model`` is traced.

    A class that cannot be kept is added to ``failed``.
    """
    kept = [part for part in model.modules() if type(part) in kinds]
    before = {part: part.__dict__.get("forward") for part in kept}
    try:
        for part in kept:
            part.forward = _whole(part, part.forward, table, failed)
        yield
    finally:
        for part, forward in before.items():
            if forward is None:
                del part.__dict__["forward"]
            else:
                part.forward = forward


def _whole(
    module: nn.Module,
    forward: Callable[..., Any],
    table: OpaqueTable,
    failed: list[type[nn.Module]],
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def whole(*args: Any, **kwargs: Any) -> Any:
        # Below the trace, the call is being run to learn what it returns.
        if get_proxy_mode() is None:
            return forward(*args, **kwargs)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        run = functools.partial(_run, module)
        name = type(module).__name__
        try:
            return call_opaquely(table, run, (tensors, *args), kwargs, name=name, modules=(module,))
        except PenstockError:
            failed.append(type(module))
            raise

    return whole


def _run(module: nn.Module, tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """A call with ``tensors`` for parameters and buffers; while it is recorded, what it returns."""

    def call(tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        given = dict(tensors)
        result = functional_call(module, given, args, kwargs)
        for name, tensor in tensors.items():
            if given[name] is not tensor:
                why = f"assigns another tensor to its '{name}' in forward"
                raise refused(type(module).__name__, why)
        return result

    if active_table() is not None:
        # Whatever went wrong goes wrong again below, where it is told, unless sizes were to blame.
        with contextlib.suppress(Exception), replaced(nn.Module, "__call__", PLAIN_CALL):
            return learned(call, (tensors, *args), kwargs)
    return call(tensors, *args, **kwargs)
