"""Values that the model's Python code asks for: recorded as it runs, given again as it is traced.

    if labels.max() >= 32: raise ValueError      a symbolic tensor is neither true nor false

The model is run as it is, on the example batch and on half of it, and each truth value or number
that its code takes out of a tensor is recorded with the line that asked. While the model is traced
the same lines get the same values, and an assertion goes into the graph beside each. A number that
differs between the two runs may only be compared: what must stay is the outcome.
"""

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.capture.assertions import assert_unchanged
from penstock.capture.capture_errors import WAY_OUT, current_line
from penstock.capture.kept_buffers import kept_buffers
from penstock.capture.python_state import kept_python_state
from penstock.errors import CaptureFailed

__all__ = ["RecordedValue", "asked_values", "replaying"]

_TRUTHS = frozenset({torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero})
_NUMBERS = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__int__,
        torch.Tensor.__index__,
        torch.Tensor.__float__,
    }
)
_AS_THEY_ARE = frozenset({torch.Tensor.item, torch.Tensor.tolist})
_TESTS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.equal: lambda one, other: (one == other).all(),
    torch.Tensor.equal: lambda one, other: (one == other).all(),
    torch.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.Tensor.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.Tensor.__contains__: lambda tensor, element: (tensor == element).any(),
}


@dataclass(frozen=True)
class RecordedValue:
    """A truth value or a number, and the line that asked for it; lists are numbers one by one.

    ``varies`` where half of the example batch gave another number.
    """

    line: str
    value: float
    varies: bool = False


def asked_values(module: nn.Module, leaves: Sequence[torch.Tensor]) -> tuple[RecordedValue, ...]:
    """What ``module`` asks for while it runs on ``leaves``, in order; buffers are as before.

    Raises:
        CaptureFailed: its code takes another branch on half of the batch; names the line.
    """
    whole = _asked(module, leaves)
    rows = leaves[0].shape[0]
    half = _asked(module, [leaf[: leaf.shape[0] * (rows // 2) // rows] for leaf in leaves])
    for one, other in zip(whole, half, strict=False):
        if one.line != other.line:
            break
        if isinstance(one.value, bool) and one.value != other.value:
            raise CaptureFailed(
                f"the model branches at {one.line} otherwise on half of the example batch than on "
                "all of it, and stages hold one branch only; write the line with tensor operations "
                f"such as torch.where, or {WAY_OUT}"
            )
    more = Counter(asked.line for asked in whole)
    more.subtract(asked.line for asked in half)
    for line, count in more.items():
        if count:
            raise CaptureFailed(
                f"the model asks for values sample by sample at {line}, but slices of a batch have "
                f"other numbers of samples; write the line with tensor operations, or {WAY_OUT}"
            )
    return tuple(
        RecordedValue(one.line, one.value, not _same(one.value, other.value))
        for one, other in zip(whole, half, strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    """Equality, with not-a-number equal to itself."""
    return one == other or (one != one and other != other)


def _asked(module: nn.Module, leaves: Sequence[torch.Tensor]) -> tuple[RecordedValue, ...]:
    mode = _Recording()
    with (
        kept_buffers(module.buffers()),
        torch.random.fork_rng(),
        kept_python_state(module),
        # What the code asks of itself must be as it will be while it is traced.
        _as_in_export(),
        mode,
    ):
        module(*leaves)
    return tuple(mode.values)


@contextlib.contextmanager
def _as_in_export() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


class _Recording(TorchFunctionMode):
    """Lets everything run, and notes what is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[RecordedValue] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; note its result if it is a plain value."""
        result = func(*args, **(kwargs or {}))
        if func in _TRUTHS or func in _NUMBERS or func in _TESTS:
            line = current_line()
            self.values += [RecordedValue(line, value) for value in _flat(result)]
        return result


def _flat(value: Any) -> Iterator[Any]:
    """The numbers in nested lists, in order."""
    if isinstance(value, list):
        for entry in value:
            yield from _flat(entry)
    else:
        yield value


def replaying(recorded: Sequence[RecordedValue]) -> TorchFunctionMode:
    """A mode in which tensors that are traced give these values, under assertions in the graph."""
    return _Replaying(recorded)


class _Replaying(TorchFunctionMode):
    def __init__(self, recorded: Sequence[RecordedValue]) -> None:
        super().__init__()
        self._left = iter(recorded)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The recorded value where ``func`` asks for one; else run ``func``."""
        if func in _TRUTHS or func in _NUMBERS or func in _TESTS:
            with self:
                return self._answer(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _TESTS:
            return self._next(_TESTS[func](*args, **kwargs))
        tensor = args[0]
        if func in _TRUTHS:
            return self._next(tensor if tensor.dtype is torch.bool else tensor != 0)
        if func is torch.Tensor.tolist and tensor.dim():
            return [entry.tolist() for entry in tensor]
        found = self._next(tensor)
        if isinstance(found, VaryingNumber) and func not in _AS_THEY_ARE:
            found.used()
        return found

    def _next(self, tensor: torch.Tensor) -> Any:
        """The next recorded value for this line; code may ask for less while it is traced."""
        line = current_line()
        for recorded in self._left:
            if recorded.line == line:
                return _one(tensor.reshape(()), recorded)
        raise CaptureFailed(
            f"the model asks for a value at {line} where it is traced, but not where it is run; "
            f"write the line with tensor operations such as torch.where, or {WAY_OUT}"
        )


def _one(tensor: torch.Tensor, recorded: RecordedValue) -> Any:
    if recorded.varies:
        return VaryingNumber(tensor, recorded)
    assert_unchanged(tensor, recorded.value, recorded.line)
    return recorded.value


class VaryingNumber:
    """A number that other batches change: code that is traced may compare it, but not use it."""

    def __init__(self, tensor: torch.Tensor, recorded: RecordedValue) -> None:
        self._tensor = tensor
        self._recorded = recorded

    def used(self, *operands: Any) -> NoReturn:
        """Refuse what is not a comparison (CaptureFailed)."""
        raise CaptureFailed(
            f"the model computes with a number at {self._recorded.line} that other batches change, "
            "but a graph holds it as a constant; leave it in a tensor (no .item(), .tolist() or "
            f"int()), or {WAY_OUT}"
        )

    def _compared(self, compare: Callable[[Any, Any], Any], other: Any) -> bool:
        if isinstance(other, torch.Tensor | VaryingNumber):
            self.used()
        known = other.node.hint if isinstance(other, torch.SymInt | torch.SymFloat) else other
        outcome = bool(compare(self._recorded.value, known))
        assert_unchanged(compare(self._tensor, other), outcome, self._recorded.line)
        return outcome

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)

    def __eq__(self, other: object) -> bool:
        return self._compared(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return self._compared(operator.ne, other)

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(VaryingNumber, f"__{_name}__", VaryingNumber.used)
    setattr(VaryingNumber, f"__r{_name}__", VaryingNumber.used)
for _name in ("index", "int", "float", "neg", "abs", "round", "ceil", "floor", "trunc", "hash"):
    setattr(VaryingNumber, f"__{_name}__", VaryingNumber.used)
