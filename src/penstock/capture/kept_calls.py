"""Calls that are kept whole because their Python code loops over the samples.

    for t, h, w in grid.tolist(): ...        runs in the stage, on the samples of each micro-batch

The unchanged model runs on the example batch and on half of it. From both runs each size that a
call returns becomes a formula ``a * samples + b``. While the model is traced, the call is one
operator (`penstock.capture.opaque`). A stage calls the original function, and its results must have
the sizes that the formulas give.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from penstock.capture.call_notes import CallNote, ResultNote, tensors_of
from penstock.capture.called_by_name import Callee
from penstock.capture.capture_errors import REMEDY
from penstock.capture.opaque import OpaqueTable, active_table, call_opaquely, refused
from penstock.capture.operators import OpaqueFacts
from penstock.capture.sample_lists import every_sample
from penstock.errors import BadInput, RunFailed

__all__ = ["KeptCall", "KeptCalls", "learnt_calls"]


TOLERANCE = 1e-4
"""Relative differences up to this are rounding: products of fewer rows may sum in another order."""


@dataclass(frozen=True)
class _AffineSize:
    """``slope * samples + rest``."""

    slope: int
    rest: int

    def at(self, samples: Any) -> Any:
        return self.slope * samples + self.rest if self.slope else self.rest


@dataclass(frozen=True)
class _Result:
    """A tensor that a kept call returns, for any number of samples.

    If ``listed`` is given, the call returns a list of that type, with a tensor for each sample.
    """

    shape: tuple[_AffineSize, ...]
    stride: tuple[_AffineSize, ...]
    dtype: torch.dtype
    device: torch.device
    with_gradient: bool
    listed: type | None = None


@dataclass(frozen=True)
class KeptCall:
    """A call that is one operator of the graph; ``line`` is the reason, for error messages.

    ``results`` are a `_Result` for each tensor and the constants between them. ``mixes``: the
    result for half of the batch is not the beginning of the result for all of it.
    """

    callee: Callee
    line: str
    results: tuple[Any, ...]
    structure: pytree.TreeSpec
    reads: frozenset[str]
    parameters: int
    heavy: bool
    random: bool
    mixes: bool

    def made(self, samples: Any) -> Any:
        """The result for ``samples`` samples, as tensors without values."""
        values = [_made(one, samples) if isinstance(one, _Result) else one for one in self.results]
        return pytree.tree_unflatten(values, self.structure)

    def from_shapes(self, samples: int) -> Any:
        """The result for estimating costs, which is possible only for calls without real work.

        Raises:
            BadInput: the call does real work, whose cost shapes cannot tell.
        """
        if self.heavy or any(one.with_gradient for one in self.results if isinstance(one, _Result)):
            raise BadInput(
                f"what {self.callee} costs cannot be estimated from shapes, because its code goes "
                f"by values ({self.line}); measure the model (measure_profile, or "
                "`penstock profile` without --estimate)"
            )
        return self.made(samples)

    def listing(self, made: Any) -> Any:
        """``made`` as the model's code gets it: a list of samples has one entry for all."""
        values = [
            one.listed([every_sample(value)])
            if isinstance(one, _Result) and one.listed is not None
            else value
            for value, one in zip(self.structure.flatten_up_to(made), self.results, strict=True)
        ]
        return pytree.tree_unflatten(values, self.structure)

    def taken(self, found: Any, samples: int) -> Any:
        """What the call returned for ``samples`` samples, with lists of samples stacked.

        Raises:
            RunFailed: it is not what the graph expects.
        """
        if any(isinstance(one, _Result) and one.listed is not None for one in self.results):
            # Containers may order their entries by creation; use the recorded order.
            leaves, structure = pytree.tree_flatten(found)
            found = pytree.tree_unflatten(leaves, structure)
        try:
            values = self.structure.flatten_up_to(found)
        except ValueError:
            values = pytree.tree_leaves(found)
        pairs = list(zip(values, self.results, strict=False))
        if len(values) != len(self.results) or not all(
            _as_learnt(value, wanted, samples) for value, wanted in pairs
        ):
            raise self._changed(values, samples)
        joined = [
            torch.stack(list(value))
            if isinstance(wanted, _Result) and wanted.listed is not None
            else value
            for value, wanted in pairs
        ]
        return pytree.tree_unflatten(joined, self.structure)

    def _changed(self, values: Sequence[Any], samples: int) -> RunFailed:
        shapes = [
            tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in pytree.tree_leaves(values)
        ]
        return RunFailed(
            f"{self.callee} returned {shapes} for {samples} samples, which is not what every "
            "sample of the batch had that the model was captured with; give every sample as "
            f"much, as the example batch does (pictures of one size), or {REMEDY} "
            f"(it is kept whole because of {self.line})"
        )


def _as_learnt(value: Any, wanted: Any, samples: int) -> bool:
    """Whether a value that a call returned for ``samples`` samples is what the graph expects."""
    if not isinstance(wanted, _Result):
        return not isinstance(value, torch.Tensor) and value == wanted
    shape = tuple(size.at(samples) for size in wanted.shape)
    if wanted.listed is None:
        return isinstance(value, torch.Tensor) and tuple(value.shape) == shape
    return (
        isinstance(value, list | tuple)
        and len(value) == samples
        and all(isinstance(one, torch.Tensor) and one.shape == shape[1:] for one in value)
    )


def _made(result: _Result, samples: Any) -> torch.Tensor:
    shape = [size.at(samples) for size in result.shape]
    stride = [size.at(samples) for size in result.stride]
    made = torch.empty_strided(shape, stride, dtype=result.dtype, device=result.device)
    return made.requires_grad_(result.with_gradient)


def learnt_calls(
    whole: Sequence[CallNote],
    half: Sequence[CallNote],
    samples: tuple[int, int],
    lines: dict[Callee, str],
    listing: Collection[Callee] = (),
) -> tuple[list[KeptCall], dict[Callee, str]]:
    """The calls for any number of samples, and why the calls of some callees cannot be kept.

    ``samples`` are the numbers of samples in the two runs; ``lines`` say why each callee is kept.
    Callees in ``listing`` may return a list of the samples.
    """
    problems: dict[Callee, str] = {}
    for callee in lines:
        counts = [sum(note.callee == callee for note in notes) for notes in (whole, half)]
        # A callee has no calls of its own if another kept call contains them.
        if counts[0] != counts[1]:
            problems[callee] = "is called sample by sample"
    for note in (*whole, *half):
        if note.problem:
            problems.setdefault(note.callee, note.problem)
    kept: list[KeptCall] = []
    pairs = [[n for n in notes if n.callee not in problems] for notes in (whole, half)]
    for one, other in zip(*pairs, strict=True):
        if one.callee in listing:
            one, other = _aligned(one, other, samples)
        results = _formulas(one, other, samples)
        if results is None:
            problems.setdefault(one.callee, "returns something else for each number of samples")
            continue
        kept.append(
            KeptCall(
                one.callee,
                lines[one.callee],
                results,
                one.structure,
                one.reads | other.reads,
                max(one.parameters, other.parameters),
                one.heavy,
                one.random,
                not all(map(_begins_with, one.results, other.results)),
            )
        )
    return kept, problems


def _formulas(one: CallNote, other: CallNote, samples: tuple[int, int]) -> tuple[Any, ...] | None:
    """The results of both runs for any number of samples; None if there is no formula."""
    if one.callee != other.callee or one.structure != other.structure:
        return None
    results: list[Any] = []
    for large, small in zip(one.results, other.results, strict=True):
        if not isinstance(large, ResultNote) or not isinstance(small, ResultNote):
            if large != small:
                return None
            results.append(large)
            continue
        shape = _sizes(large.shape, small.shape, samples)
        stride = _sizes(large.stride, small.stride, samples)
        if shape is None or stride is None or large.dtype != small.dtype:
            return None
        if large.listed is not small.listed:
            return None
        results.append(
            _Result(shape, stride, large.dtype, large.device, large.with_gradient, large.listed)
        )
    return tuple(results)


def _aligned(one: CallNote, other: CallNote, samples: tuple[int, int]) -> tuple[CallNote, CallNote]:
    """Two notes of a call; if their structures differ, lists of samples become single tensors."""
    if one.structure == other.structure:
        return one, other
    return _listed(one, samples[0]), _listed(other, samples[1])


def _listed(note: CallNote, samples: int) -> CallNote:
    """``note`` with each list of as many equal tensors as samples as one stacked tensor."""

    def is_list(value: Any) -> bool:
        if type(value) not in (list, tuple) or len(value) != samples:
            return False
        shapes = {one.shape for one in value if isinstance(one, ResultNote)}
        return len(shapes) == 1 and all(isinstance(one, ResultNote) for one in value)

    nested = pytree.tree_unflatten(list(note.results), note.structure)
    values, structure = pytree.tree_flatten(nested, is_leaf=is_list)
    results = [_together(value) if is_list(value) else value for value in values]
    return replace(note, results=tuple(results), structure=structure)


def _together(notes: Sequence[ResultNote]) -> ResultNote:
    value, first = torch.stack([note.value for note in notes]), notes[0]
    return ResultNote(
        tuple(value.shape),
        tuple(value.stride()),
        first.dtype,
        first.device,
        any(note.with_gradient for note in notes),
        value,
        type(notes),
    )


def _begins_with(large: Any, small: Any) -> bool:
    """Whether ``small``, a result for half of the batch, is the beginning of ``large``."""
    if not isinstance(large, ResultNote):
        return True
    start = large.value[tuple(map(slice, small.shape))].double()
    floor = TOLERANCE * float(start.abs().max()) if start.numel() else 0.0
    return torch.allclose(start, small.value.double(), rtol=TOLERANCE, atol=floor, equal_nan=True)


def _sizes(
    large: tuple[int, ...], small: tuple[int, ...], samples: tuple[int, int]
) -> tuple[_AffineSize, ...] | None:
    if len(large) != len(small):
        return None
    found: list[_AffineSize] = []
    for one, other in zip(large, small, strict=True):
        slope, rest = divmod(one - other, samples[0] - samples[1])
        if rest:
            return None
        found.append(_AffineSize(slope, one - slope * samples[0]))
    return tuple(found)


class KeptCalls:
    """Records ``calls`` in ``table`` while a model is traced.

    ``samples()`` is the symbolic number of samples then.
    """

    def __init__(
        self, calls: Sequence[KeptCall], table: OpaqueTable, samples: Callable[[], Any]
    ) -> None:
        self._calls = calls
        self._table = table
        self._samples = samples
        self._left: dict[Callee, Iterator[KeptCall]] = {}

    @property
    def callees(self) -> frozenset[Callee]:
        """The functions that are kept whole."""
        return frozenset(call.callee for call in self._calls)

    def restart(self) -> None:
        """Begin again with the first call, for another trace."""
        self._left = {
            callee: iter([call for call in self._calls if call.callee == callee])
            for callee in self.callees
        }

    def wrap(
        self, callee: Callee, module: nn.Module | None, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function to call instead of ``function``."""

        @wraps(function)
        def whole(*args: Any, **kwargs: Any) -> Any:
            # Inside a recorded call, or in a run of the unchanged model.
            if get_proxy_mode() is None:
                return function(*args, **kwargs)
            call = next(self._left[callee], None)
            if call is None:
                raise refused(str(callee), "is called more often while traced than when run")
            tensors = {n: t for n, t in tensors_of(module).items() if n in call.reads}
            name = str(callee)
            made = call_opaquely(
                self._table,
                partial(_run, call, module, function),
                (self._samples(), tensors, *args),
                kwargs,
                name=name,
                modules=() if module is None else (module,),
                known=OpaqueFacts(call.heavy, call.random, mixes=name if call.mixes else ""),
            )
            return call.listing(made)

        return whole


def _run(
    call: KeptCall,
    module: nn.Module | None,
    function: Callable[..., Any],
    samples: Any,
    tensors: dict[str, torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A call with ``tensors`` for parameters and buffers; during recording, only its result."""
    if active_table() is not None:
        return call.made(samples)
    if any(isinstance(one, FakeTensor) for one in pytree.tree_leaves((tensors, args, kwargs))):
        return call.from_shapes(samples)
    if module is None or not tensors:
        result = function(*args, **kwargs)
    else:
        with _reparametrize_module(module, tensors, tie_weights=True):
            result = function(*args, **kwargs)
    return call.taken(result, samples)
