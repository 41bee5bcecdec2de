"""Stages of a rank that take the time of computing, and send tensors with the sizes of a profile.

The tensors are smaller than planned, all in one proportion.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from penstock.capture.contract import TensorSpec
from penstock.capture.forward.stage_module import StageProgram
from penstock.plan.plan import Plan
from penstock.rehearse.emulation import Crossings, SharedPiece
from penstock.runtime.stage.runner import LossTerm, StageInputs, Tensors, Work
from penstock.runtime.transport.messages import BoundaryTensors, Message
from penstock.schedule.action import ActionKind
from penstock.simulate.workload import Replica

FLOAT_BYTES = 4

Part: TypeAlias = tuple[float, Sequence[nn.Parameter]]


def boundaries_of_crossings(crossings: Crossings, byte_scale: float) -> tuple[BoundaryTensors, ...]:
    """The tensors between each two stages, one byte an element."""
    by_ends: dict[tuple[int, int], list[TensorSpec]] = {}
    for (producer, consumer, name), edge in crossings.items():
        whole = edge.goes_whole
        size = max(1, round((edge.bytes.fixed if whole else edge.bytes.at(1)) * byte_scale))
        spec = TensorSpec(
            name,
            (size,) if whole else (1, size),
            torch.uint8,
            -1 if whole else 0,
            requires_grad=edge.gradient_bytes.at(1) > 0,
        )
        by_ends.setdefault((producer, consumer), []).append(spec)
    return tuple(BoundaryTensors(*ends, tuple(specs)) for ends, specs in by_ends.items())


def planned_size(message: Message, crossings: Crossings) -> tuple[float, int]:
    """The bytes that the plan has for a message, and the number of its tensors that have any."""
    size_bytes, tensors = 0.0, 0
    ends = sorted((message.sender_stage, message.receiver_stage))
    for part in message.parts:
        edge = crossings[ends[0], ends[1], part.spec.name]
        rows = 1 if part.dim < 0 else len(part.source_rows)
        cost = edge.bytes if message.kind == "F" else edge.gradient_bytes
        size_bytes += cost.at(rows)
        tensors += cost.at(rows) > 0
    return size_bytes, tensors


def program_of(stage: int, boundaries: Sequence[BoundaryTensors], plan: Plan) -> StageProgram:
    """A program that only has what a stage receives and sends; its module is empty."""
    received = tuple(spec for b in boundaries if b.consumer == stage for spec in b.tensors)
    sent = {spec.name: spec for b in boundaries if b.producer == stage for spec in b.tensors}
    empty: Any = nn.Module()  # nothing runs it
    layers, is_last = plan.stages[stage].layers, stage == len(plan.stages) - 1
    return StageProgram(layers, empty, (), received, tuple(sent.values()), is_last)


def parameter_of(piece: SharedPiece, byte_scale: float) -> nn.Parameter:
    """A parameter with the scaled size of ``piece``."""
    return nn.Parameter(torch.zeros(max(1, round(piece.bytes * byte_scale / FLOAT_BYTES))))


def last_parts(
    replica: Replica,
    layers: range,
    segment_layers: Sequence[int],
    parameters: Mapping[SharedPiece, nn.Parameter],
    time_scale: float,
) -> list[Part]:
    """The parts of a replica's last action that makes gradients; see `EmulatedStage`."""
    parts: list[Part] = []
    above = layers.stop
    for end, seconds in zip(segment_layers, replica.work.segments_s, strict=True):
        complete = [
            parameter
            for piece, parameter in parameters.items()
            if replica.stage in piece.stages and end <= max(piece.layer, layers.start) < above
        ]
        parts.append((seconds * time_scale, complete[::-1]))
        above = end
    return parts


@dataclass
class EmulatedStage:
    """A substitute for a stage of a captured model; see `FedRunner`.

    ``seconds`` are those of its actions here, on this rank's rows. ``last`` are the parts of the
    last action that makes gradients: the seconds of each, and the parameters whose gradients are
    complete at its end.
    ``launching`` starts gradient sums within the last backward. ``sleep_until`` takes the time of
    an action: it waits for a moment, and returns it.
    """

    program: StageProgram
    seconds: Mapping[ActionKind, float]
    last: Sequence[Part]
    launching: Callable[[], AbstractContextManager[object]]
    sleep_until: Callable[[float], float]
    loss_terms: list[LossTerm] = field(default_factory=list[LossTerm])
    seed: float = 1.0
    inputs: StageInputs = field(default_factory=lambda: StageInputs((), ()))

    def has_work(self, kind: ActionKind) -> bool:
        """Wait in every action as long as it takes."""
        return True

    def begin(self, work: StageInputs) -> None:
        """Take the rows of the next iteration."""
        self.inputs = work

    def work(self, kind: ActionKind) -> Work:
        """The function that replaces actions of one kind."""
        program = self.program
        sent = {"F": program.sent, "B": program.received, "I": program.received}.get(kind, ())

        def run(micro_batch: int, _: Tensors) -> Tensors:
            start_s, rows = time.perf_counter(), self.inputs.rows[micro_batch]
            made = [
                torch.zeros(spec.shape_for(rows), dtype=spec.dtype)
                if kind == "F" or spec.requires_grad
                else None
                for spec in sent
            ]
            self._take_time(kind, micro_batch, start_s)
            return made

        return run

    def _take_time(self, kind: ActionKind, micro_batch: int, start_s: float) -> None:
        last = kind in "BW" and micro_batch == self.inputs.last_backward
        if not last or (kind == "B" and micro_batch in self.inputs.halved):
            self.sleep_until(start_s + self.seconds[kind])
            return
        with self.launching():
            for part_s, complete in self.last:
                start_s = self.sleep_until(start_s + part_s)
                for parameter in complete:
                    parameter.backward(torch.zeros_like(parameter))
