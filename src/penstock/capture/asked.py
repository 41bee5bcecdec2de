"""Finds which values of tensors the Python code of a model uses, from two runs of the model.

The model runs on the example batch and on half of it. The values that its lines use are compared:

    used equally often in both runs   recorded, and checked by an assertion (`recorded_values`)
    used once for each sample         options are tried in turn: keep the innermost function around
                                      the line whole (`kept_calls`); let a list of sizes only split
                                      a tensor that is joined again (`sample_pieces`); keep a
                                      function further out whole

Modules that are kept whole anyway (`kept_modules`) may use any value.
"""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock.capture.call_notes import CallNote, CallNotes, tensors_of
from penstock.capture.called_by_name import Callee, replaced_callees
from penstock.capture.capture_errors import REMEDY, GoesByValues
from penstock.capture.kept_calls import KeptCall, learnt_calls
from penstock.capture.loss_module import LossModule
from penstock.capture.python_state import kept_python_state
from penstock.capture.recorded_values import RecordedValue, Recording
from penstock.capture.training_flags import kept_buffers_of

__all__ = ["DataDependence", "NotKept", "asked_values"]

LARGEST_SHARE = 0.8
"""A call kept whole may read at most this fraction of the parameters, so that cuts remain."""


class NotKept(Exception):
    """A function that should be kept whole cannot be."""

    def __init__(self, callee: Callee, problem: str) -> None:
        super().__init__(f"{callee} {problem}")
        self.callee = callee


@dataclass(frozen=True)
class DataDependence:
    """The values that code uses, the calls that are kept whole, and the lines that split tensors.

    It is false if the code uses no values.
    """

    values: tuple[RecordedValue, ...] = ()
    kept: tuple[KeptCall, ...] = ()
    pieces: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.values or self.kept or self.pieces)


@dataclass(frozen=True)
class _Run:
    recording: Recording
    calls: list[CallNote]


_PIECES = "pieces"


class _Remedies:
    """For each line that uses a value of each sample, the option tried now and those left."""

    def __init__(self, not_joined: Collection[str]) -> None:
        self._not_joined = not_joined
        self._within: dict[str, Sequence[Callee]] = {}
        self._now: dict[str, Callee | str] = {}
        self._left: dict[str, Iterator[Callee | str]] = {}
        self._why: dict[str, str] = {}

    @property
    def kept(self) -> dict[Callee, str]:
        """The functions to keep whole, each with a line that it is kept for."""
        return {way: line for line, way in self._now.items() if isinstance(way, Callee)}

    @property
    def pieces(self) -> frozenset[str]:
        """The lines whose lists of sizes only split tensors."""
        return frozenset(line for line, way in self._now.items() if not isinstance(way, Callee))

    def know(self, recording: Recording) -> None:
        """Collect the options for lines that are new."""
        for line, callees in recording.callees.items():
            ways: list[Callee | str] = list(callees)
            if line in recording.lists and line not in self._not_joined:
                ways.insert(1, _PIECES)
            self._left.setdefault(line, iter(ways))
            self._within[line] = callees

    def next(self, line: str) -> None:
        """Try the next option for ``line`` (GoesByValues if none is left)."""
        way = next(self._left[line], None)
        if way is None:
            raise GoesByValues(
                f"the model asks for values sample by sample at {line}, but slices of a batch have "
                "other numbers of samples; write the line with tensor operations, or "
                f"{REMEDY}{self._why.get(line, '')}",
                self._within[line],
            )
        self._now[line] = way

    def discard(self, callee: Callee, problem: str) -> None:
        """Try the next option for the lines for which ``callee`` is kept."""
        for line in [line for line, way in self._now.items() if way == callee]:
            self._why[line] = f" ({callee} around it cannot be kept whole: it {problem})"
            self.next(line)


def asked_values(
    module: LossModule,
    leaves: Sequence[torch.Tensor],
    kept_classes: Collection[type[nn.Module]] = (),
    not_joined: Collection[str] = (),
    wanted: Collection[Callee] = (),
) -> DataDependence:
    """The values that ``module`` uses while it runs on ``leaves``; buffers are restored.

    Values used by modules of ``kept_classes`` are left out. ``not_joined`` are lines that get lists
    of sizes but do more with them than split tensors. The functions ``wanted`` are kept whole in
    any case.

    Raises:
        NotKept: one of ``wanted`` cannot be kept whole.
        GoesByValues: the code takes another branch on half of the batch, or uses a value of each
            sample where nothing around the line can be kept whole; names the line.
    """
    samples = leaves[0].shape[0]
    halves = [leaf[: samples // 2] for leaf in leaves]
    ways = _Remedies(not_joined)
    while True:
        kept = {callee: f"{callee}, whose code goes by values" for callee in wanted} | ways.kept
        # One after the other, as micro-batches run, since the first one may initialise buffers.
        with kept_buffers_of(module):
            whole, half = _run(module, leaves, kept), _run(module, halves, kept)
        numbers = (samples, samples // 2)
        calls, problems = learnt_calls(whole.calls, half.calls, numbers, kept, wanted)
        problems |= _too_large(calls, module.model)
        one, other = (_without(run, ways.pieces, kept_classes) for run in (whole, half))
        lines = _sample_by_sample(one, other)
        if not problems and not lines:
            values = _compared(one, other, whole.recording.callees)
            return DataDependence(values, tuple(calls), ways.pieces)
        for run in (whole, half):
            ways.know(run.recording)
        for callee, problem in problems.items():
            if callee in wanted:
                raise NotKept(callee, problem)
            ways.discard(callee, problem)
        for line in lines:
            ways.next(line)


def _run(module: LossModule, leaves: Sequence[torch.Tensor], kept: Collection[Callee]) -> _Run:
    notes = CallNotes(list(leaves))
    mode = Recording(module.model, lambda: notes.inside is not None)

    def wrap(callee: Callee, part: nn.Module | None, function):
        return lambda *args, **kwargs: notes.call(callee, part, function, args, kwargs)

    with (
        torch.random.fork_rng(),
        kept_python_state(module),
        replaced_callees(module.model, kept, wrap),
        # The code must see the same answers to "is this being traced?" as during tracing.
        _as_in_export(),
        notes if kept else contextlib.nullcontext(),
        mode,
    ):
        module(*leaves)
    return _Run(mode, notes.found)


@contextlib.contextmanager
def _as_in_export() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


def _too_large(calls: Sequence[KeptCall], model: nn.Module) -> dict[Callee, str]:
    """Functions that read so much of the model that little would be left to cut."""
    total = sum(tensor.numel() for tensor in tensors_of(model).values())
    return {
        call.callee: "reads most of the model's parameters"
        for call in calls
        if call.parameters > LARGEST_SHARE * total
    }


def _without(
    run: _Run, pieces: Collection[str], kept: Collection[type[nn.Module]]
) -> list[RecordedValue]:
    """The values used, except on the lines ``pieces`` and in modules of the classes ``kept``."""
    return [
        value
        for value in run.recording.values
        if value.line not in pieces and not any(type(part) in kept for part in value.within)
    ]


def _sample_by_sample(
    whole: Sequence[RecordedValue], half: Sequence[RecordedValue]
) -> tuple[str, ...]:
    """The lines that use more values on the whole batch than on half of it."""
    more = Counter(asked.line for asked in whole)
    more.subtract(asked.line for asked in half)
    return tuple(line for line, count in more.items() if count)


def _compared(
    whole: Sequence[RecordedValue],
    half: Sequence[RecordedValue],
    callees: Mapping[str, Sequence[Callee]],
) -> tuple[RecordedValue, ...]:
    """The values of the whole batch, each with whether that of half of it differs."""
    for one, other in zip(whole, half, strict=True):
        if one.line != other.line:
            break
        if isinstance(one.value, bool) and one.value != other.value:
            raise GoesByValues(
                f"the model branches at {one.line} otherwise on half of the example batch than on "
                "all of it, and stages hold one branch only; write the line with tensor operations "
                f"such as torch.where, or {REMEDY}",
                callees[one.line],
            )
    return tuple(
        replace(one, varies=not _same(one.value, other.value))
        for one, other in zip(whole, half, strict=True)
    )


def _same(one: float, other: float) -> bool:
    """Equality in which NaN equals NaN."""
    return one == other or (one != one and other != other)
