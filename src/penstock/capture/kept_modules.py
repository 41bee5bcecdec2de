"""Modules that are kept whole because tracing would unroll one of their loops.

    for word in range(2048): state = decay * state + ...      one operator instead of 16,384

Recurrences without a kernel (Mamba, RWKV, chunks of linear attention) are such loops.
`OwnOperators` counts operators while a model is traced. If one call of a module has too many of its
own, the model is traced again with the modules of that class kept whole (`capture.opaque`). Their
parameters are arguments of the call, so a stage passes them and computes their gradients.

Finds what a module returns for a symbolic number of samples, from runs with two numbers.

A loop over thousands of words is fast on tensors without storage, but slow on tensors with symbolic
sizes, for which every operator does algebra. So the loop runs for ``n`` and for ``n + 3`` samples.
From both, each size and stride of the results becomes a formula ``a * samples + b``.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from penstock.capture.opaque import OpaqueTable, active_table, call_opaquely, refused
from penstock.capture.torch_calls import TorchCalls, replaced
from penstock.errors import PenstockError

__all__ = ["OwnOperators", "Unknown", "keeping_modules", "learned"]

PLAIN_CALL: Any = nn.Module._wrapped_call_impl
"""What tracing replaces. With the replacement, failed calls would count as still running."""

LIMIT = 300
"""Most operators that one call of a module may have itself, without those of its submodules.

Calls of torch functions are counted, including those for sizes and types. BigBird's block-sparse
attention has 240 and Longformer's 176, without such a loop; a decoder's attention has 26 to 60.
"""

EVERY = 20
"""The stack is examined after every this many operators."""


class OwnOperators(TorchCalls):
    """Stops tracing if a module of a class not in ``unlimited`` has too many operators.

    ``found`` is that class.
    """

    def __init__(self, model: nn.Module, unlimited: Collection[type[nn.Module]]) -> None:
        super().__init__()
        self.found: type[nn.Module] | None = None
        self._classes = {id(part.__dict__): type(part) for part in model.modules()}
        self._top = id(model.__dict__)
        self._unlimited = unlimited
        self._operators = 0
        self._counts: dict[FrameType, int] = {}

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count the operator and run ``func``."""
        self._operators += 1
        if self._operators % EVERY == 0:
            self._look(sys._getframe(2))
        return func(*args, **kwargs)

    def _look(self, frame: FrameType | None) -> None:
        """Count operators for the innermost module; drop calls that have returned."""
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
    """Ends a trace that will be repeated."""


@contextlib.contextmanager
def keeping_modules(
    model: nn.Module,
    kinds: Collection[type[nn.Module]],
    table: OpaqueTable,
    failed: list[type[nn.Module]],
) -> Iterator[None]:
    """Record each call of a module of ``kinds`` in ``table`` while ``model`` is traced.

    A class that cannot be kept whole is added to ``failed``.
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
        # Inside a recorded call, which runs to find out what it returns.
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
    """A call with ``tensors`` for parameters and buffers; during recording, only its result."""

    def call(tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        given = dict(tensors)
        result = functional_call(module, given, args, kwargs)
        for name, tensor in tensors.items():
            if given[name] is not tensor:
                why = f"assigns another tensor to its '{name}' in forward"
                raise refused(type(module).__name__, why)
        return result

    if active_table() is not None:
        # Unless sizes are to blame, the same error occurs again below and is reported there.
        with contextlib.suppress(Exception), replaced(nn.Module, "__call__", PLAIN_CALL):
            return learned(call, (tensors, *args), kwargs)
    return call(tensors, *args, **kwargs)


STEP = 3


class Unknown(Exception):
    """The results cannot be found this way."""


def learned(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of ``function(*args, **kwargs)`` for symbolic tensors, without running on them.

    Raises:
        Unknown: several independent sizes are symbolic, or no such formula fits the results.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    samples = _samples(tensors)
    base = samples.node.hint

    def run(rows: int) -> tuple[list[Any], pytree.TreeSpec]:
        with unset_fake_temporarily():
            concrete = [_concrete(leaf, rows) for leaf in leaves]
            own_args, own_kwargs = pytree.tree_unflatten(concrete, spec)
            return pytree.tree_flatten(function(*own_args, **own_kwargs))

    first, form = run(base)
    second, other_form = run(base + STEP)
    if form != other_form:
        raise Unknown
    made = [_between(*pair, samples, tensors[0]) for pair in zip(first, second, strict=True)]
    return pytree.tree_unflatten(made, form)


def _samples(tensors: Sequence[torch.Tensor]) -> torch.SymInt:
    """The number of samples: the one size that is a symbol by itself."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    symbols = [s for s in sizes if isinstance(s, torch.SymInt) and s.node.expr.is_Symbol]
    if not symbols:
        raise Unknown
    return symbols[0]


def _at(size: Any, rows: int) -> Any:
    """A size for ``rows`` samples; the symbols of all leaves of the batch mean the samples."""
    if not isinstance(size, torch.SymInt):
        return size
    expression, sources = size.node.expr, size.node.shape_env.var_to_sources
    for symbol in expression.free_symbols:
        # Samples are dimension 0 of every tensor of the batch.
        if any(getattr(source, "idx", None) != 0 for source in sources.get(symbol, [None])):
            raise Unknown
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(rows))))


def _concrete(leaf: Any, rows: int) -> Any:
    """An argument without symbols; tensors have no storage."""
    if isinstance(leaf, torch.Tensor):
        shape = [_at(size, rows) for size in leaf.shape]
        stride = [_at(size, rows) for size in leaf.stride()]
        made = torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta")
        return made.requires_grad_(leaf.requires_grad)
    return torch.device("meta") if isinstance(leaf, torch.device) else _at(leaf, rows)


def _between(first: Any, second: Any, samples: torch.SymInt, like: torch.Tensor) -> Any:
    """A symbolic tensor that fits both results, on the device of ``like``."""
    if not isinstance(first, torch.Tensor):
        if first != second:
            raise Unknown
        return first
    shape = [_formula(*pair, samples) for pair in zip(first.shape, second.shape, strict=True)]
    stride = [
        _formula(*pair, samples) for pair in zip(first.stride(), second.stride(), strict=True)
    ]
    made = torch.empty_strided(shape, stride, dtype=first.dtype, device=like.device)
    return made.requires_grad_(first.requires_grad)


def _formula(first: int, second: int, samples: torch.SymInt) -> Any:
    slope, rest = divmod(second - first, STEP)
    if rest:
        raise Unknown
    return slope * samples + (first - slope * samples.node.hint) if slope else first
