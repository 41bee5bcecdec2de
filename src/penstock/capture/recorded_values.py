"""Values of tensors that Python code uses: recorded in a normal run, and used again while tracing.

    if labels.max() >= 32: raise ValueError      a symbolic tensor is neither true nor false

The unchanged model runs on the example batch and on half of it. Each truth value or number that its
code takes from a tensor is recorded with its line. While the model is traced, the same lines get
the same values, and a check is added to the graph for each. A number that differs between the two
runs may only be compared; then the check is that the outcome stays the same.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any, NoReturn

import torch
from torch import nn

from penstock.capture.called_by_name import Callee, callees_on_stack
from penstock.capture.capture_errors import REMEDY, GoesByValues, current_line, running_modules
from penstock.capture.operators import assert_unchanged
from penstock.capture.torch_calls import TorchCalls

__all__ = ["RecordedValue", "Recording", "replaying"]

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
    torch.equal: lambda one, other: _equal(one, other),
    torch.Tensor.equal: lambda one, other: _equal(one, other),
    torch.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.Tensor.allclose: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.Tensor.__contains__: lambda tensor, element: (tensor == element).any(),
}


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """As `torch.equal`, which does not broadcast."""
    sizes = zip(one.shape, other.shape, strict=False)
    unlike = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)
    return torch.tensor(False) if unlike or one.dim() != other.dim() else (one == other).all()


@dataclass(frozen=True)
class RecordedValue:
    """A truth value or a number, and the line that used it; lists are recorded number by number.

    ``varies``: half of the example batch gave another number. ``within`` are the modules that were
    running, innermost first.
    """

    line: str
    value: float
    varies: bool = False
    within: tuple[nn.Module, ...] = field(default=(), compare=False, repr=False)


class Recording(TorchCalls):
    """Runs everything and records the values that are used, unless ``is_paused()``.

    ``callees`` are the functions that were running when each line first used a value. ``lists``
    are the lines that used only lists of integers.
    """

    def __init__(self, model: nn.Module, is_paused: Callable[[], bool]) -> None:
        super().__init__()
        self.values: list[RecordedValue] = []
        self.callees: dict[str, tuple[Callee, ...]] = {}
        self.lists: set[str] = set()
        self._model = model
        self._is_paused = is_paused

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and record its result if that is a plain value."""
        result = func(*args, **kwargs)
        if (func in _TRUTHS or func in _NUMBERS or func in _TESTS) and not self._is_paused():
            line = current_line()
            if line not in self.callees:
                self.callees[line] = callees_on_stack(self._model)
                self.lists.add(line)
            if func is not torch.Tensor.tolist or args[0].dim() != 1:
                self.lists.discard(line)
            within = tuple(running_modules(sys._getframe(2)))
            self.values += [RecordedValue(line, value, within=within) for value in _flat(result)]
        return result


def _flat(value: Any) -> Iterator[Any]:
    """The numbers in nested lists, in order."""
    if isinstance(value, list):
        for entry in value:
            yield from _flat(entry)
    else:
        yield value


def replaying(recorded: Sequence[RecordedValue]) -> TorchCalls:
    """A mode in which traced tensors give these values, with checks in the graph."""
    return _Replaying(recorded)


class _Replaying(TorchCalls):
    def __init__(self, recorded: Sequence[RecordedValue]) -> None:
        super().__init__()
        self._left = iter(recorded)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The recorded value if ``func`` asks for one; otherwise run ``func``."""
        if func in _TRUTHS or func in _NUMBERS or func in _TESTS:
            with self:
                return self._answer(func, args, kwargs)
        return func(*args, **kwargs)

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
        """The next recorded value for this line; while traced, code may use fewer values."""
        line = current_line()
        for recorded in self._left:
            if recorded.line == line:
                return _one(tensor.reshape(()), recorded)
        raise GoesByValues(
            f"the model asks for a value at {line} where it is traced, but not where it is run; "
            f"write the line with tensor operations such as torch.where, or {REMEDY}"
        )


def _one(tensor: torch.Tensor, recorded: RecordedValue) -> Any:
    if recorded.varies:
        return VaryingNumber(tensor, recorded)
    assert_unchanged(tensor, recorded.value, recorded.line)
    return recorded.value


class VaryingNumber:
    """A number that differs for other batches: traced code may compare it but not use it."""

    def __init__(self, tensor: torch.Tensor, recorded: RecordedValue) -> None:
        self._tensor = tensor
        self._recorded = recorded

    def used(self, *operands: Any) -> NoReturn:
        """Refuse anything but a comparison (CaptureFailed)."""
        raise GoesByValues(
            f"the model computes with a number at {self._recorded.line} that other batches change, "
            "but a graph holds it as a constant; leave it in a tensor (no .item(), .tolist() or "
            f"int()), or {REMEDY}"
        )

    def compared(self, compare: Callable[[Any, Any], Any], other: Any) -> bool:
        """The outcome of a comparison, which must be the same for every batch (CaptureFailed)."""
        if isinstance(other, torch.Tensor | VaryingNumber):
            self.used()
        known = other.node.hint if isinstance(other, torch.SymInt | torch.SymFloat) else other
        outcome = bool(compare(self._recorded.value, known))
        assert_unchanged(compare(self._tensor, other), outcome, self._recorded.line)
        return outcome

    def __bool__(self) -> bool:
        return self.compared(operator.ne, 0)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _compare = partialmethod(VaryingNumber.compared, getattr(operator, _name))
    setattr(VaryingNumber, f"__{_name}__", _compare)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(VaryingNumber, f"__{_name}__", VaryingNumber.used)
    setattr(VaryingNumber, f"__r{_name}__", VaryingNumber.used)
for _name in ("index", "int", "float", "neg", "abs", "round", "ceil", "floor", "trunc", "hash"):
    setattr(VaryingNumber, f"__{_name}__", VaryingNumber.used)
