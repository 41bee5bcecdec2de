"""A stage that waits for as long as its actions would compute, and sends tensors of their sizes."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from penstock.capture.stage_program import StageProgram, TensorSpec
from penstock.errors import RunFailed
from penstock.rehearse.emulated_tensors import TIED, EmulatedParameters, mark_of
from penstock.runtime.stages.runner import LossTerm, StageInputs, Tensors, Work
from penstock.schedule.action import ActionKind
from penstock.simulate.stage_work import StageWork
from penstock.simulate.workload import Replica

__all__ = [
    "Computing",
    "EmulatedStage",
    "Lateness",
    "StageTimes",
    "alone",
    "stage_times",
    "wait_until",
]


@dataclass(slots=True)
class Lateness:
    """How late this rank woke up from its waits: a machine that is too busy shows here."""

    waits: int = 0
    total_s: float = 0.0

    def add(self, late_s: float) -> None:
        """Count one wait."""
        self.waits += 1
        self.total_s += late_s


Computing: TypeAlias = Callable[[float, float], float]
"""Takes the time of computing: from its beginning, for so many seconds; returns its end."""


def alone(begin_s: float, seconds: float, lateness: Lateness) -> float:
    """Take the time of computing on a device with cores of its own."""
    wait_until(begin_s + seconds, lateness)
    return begin_s + seconds


def wait_until(end_s: float, lateness: Lateness) -> None:
    """Sleep until ``end_s`` of `time.perf_counter`."""
    left_s = end_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
        lateness.add(time.perf_counter() - end_s)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage's actions here, on this rank's rows.

    ``last`` are the parts of the last action that makes gradients: the seconds of each, and the
    parameters whose gradients are complete at its end.
    """

    seconds: Mapping[ActionKind, float]
    last: tuple[tuple[float, tuple[nn.Parameter, ...]], ...]


def stage_times(
    replica: Replica, work: StageWork, parameters: EmulatedParameters, time_scale: float
) -> StageTimes:
    """The times of one replica of a stage, from the profile and its device."""
    kinds: tuple[ActionKind, ...] = ("F", "B", "I", "W", "R")
    own = parameters.of_stage[replica.stage]
    ends = work.segment_layers
    last: list[tuple[float, tuple[nn.Parameter, ...]]] = []
    above = work.layers.stop
    for number, (end, seconds) in enumerate(zip(ends, replica.work.segments_s, strict=True)):
        final = number == len(ends) - 1
        complete = [
            parameter
            for name, parameter in own.items()
            if (final if name.startswith(TIED) else end <= parameters.layers[name] < above)
        ]
        last.append((seconds * time_scale, tuple(reversed(complete))))
        above = end
    return StageTimes(
        {kind: replica.work.seconds(kind) * time_scale for kind in kinds}, tuple(last)
    )


@dataclass
class EmulatedStage:
    """Stands in for a stage of a captured model; see `FedRunner`.

    ``expected[name]`` are the stages whose marks a received activation or, summed, a gradient of a
    sent tensor carries. ``launching`` starts gradient sums within the last backward.
    ``computing`` takes the time of an action.
    """

    stage: int
    program: StageProgram
    times: StageTimes
    senders: Mapping[str, int]
    readers: Mapping[str, Sequence[int]]
    launching: Callable[[], AbstractContextManager[object]]
    computing: Computing
    loss_terms: list[LossTerm] = field(default_factory=list[LossTerm])
    seed: float = 1.0
    inputs: StageInputs = field(default_factory=lambda: StageInputs((), ()))

    def has_work(self, kind: ActionKind) -> bool:
        """Every action takes its time."""
        return True

    def begin(self, work: StageInputs) -> None:
        """Take the rows of the next iteration."""
        self.inputs = work

    def work(self, kind: ActionKind) -> Work:
        """The function that stands in for actions of one kind."""
        match kind:
            case "F":
                return self._forward
            case "B" | "I":
                return lambda m, gradients: self._backward(kind, m, gradients)
            case "W" | "R":
                return lambda m, _: self._without_messages(kind, m)

    def _forward(self, micro_batch: int, received: Tensors) -> Tensors:
        start_s = time.perf_counter()
        for spec, tensor in zip(self.program.received, received, strict=True):
            self._check(spec, tensor, "F", micro_batch, [self.senders[spec.name]])
        sent = self._filled(self.program.sent, "F", micro_batch)
        self.computing(start_s, self.times.seconds["F"])
        return sent

    def _backward(self, kind: ActionKind, micro_batch: int, gradients: Tensors) -> Tensors:
        start_s = time.perf_counter()
        for spec, tensor in zip(self.program.sent, gradients, strict=True):
            if spec.requires_grad:
                self._check(spec, tensor, "B", micro_batch, self.readers[spec.name])
        sent = self._filled(self.program.received, "B", micro_batch)
        self._take_time(kind, micro_batch, start_s)
        return sent

    def _without_messages(self, kind: ActionKind, micro_batch: int) -> Tensors:
        self._take_time(kind, micro_batch, time.perf_counter())
        return ()

    def _take_time(self, kind: ActionKind, micro_batch: int, start_s: float) -> None:
        last = kind in "BW" and micro_batch == self.inputs.last_backward
        if not last or (kind == "B" and micro_batch in self.inputs.halved):
            self.computing(start_s, self.times.seconds[kind])
            return
        with self.launching():
            for seconds, complete in self.times.last:
                start_s = self.computing(start_s, seconds)
                for parameter in complete:
                    parameter.backward(torch.zeros_like(parameter))

    def _filled(self, specs: Sequence[TensorSpec], kind: str, micro_batch: int) -> Tensors:
        rows, mark = self.inputs.rows[micro_batch], mark_of(kind, self.stage, micro_batch)
        return [
            torch.full(spec.shape_for(rows), mark, dtype=spec.dtype)
            if kind == "F" or spec.requires_grad
            else None
            for spec in specs
        ]

    def _check(
        self,
        spec: TensorSpec,
        tensor: torch.Tensor | None,
        kind: str,
        micro_batch: int,
        stages: Sequence[int],
    ) -> None:
        """Raise `RunFailed` for a tensor of another stage or micro-batch than it should be."""
        if spec.batch_dim < 0 or not self.inputs.rows[micro_batch]:
            return
        expected = sum(mark_of(kind, stage, micro_batch) for stage in stages) % 256
        ends = [] if tensor is None else [int(tensor[0, 0]), int(tensor[-1, -1])]
        if ends != [expected, expected]:
            raise RunFailed(
                f"stage {self.stage} received for {kind}{micro_batch} a tensor '{spec.name}' that "
                f"another action sent (marked {ends} in place of {expected}); the order of the "
                f"ranks' actions is not that of one schedule"
            )
