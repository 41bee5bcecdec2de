"""Stages of a rank that take the time of computing, and send tensors with the sizes of a profile.

The tensors are smaller than planned, all in one proportion.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TypeAlias

import torch
from torch import nn

from penstock.capture.stage_program import StageProgram, TensorSpec
from penstock.cluster.collectives import BUCKET_BYTES
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile, SharedParameter
from penstock.rehearse.emulation import Crossing, Emulation
from penstock.runtime.stages.runner import LossTerm, StageInputs, Tensors, Work
from penstock.runtime.transport.messages import BoundaryTensors, Message
from penstock.schedule.action import ActionKind
from penstock.simulate.stage_work import StageWork
from penstock.simulate.workload import Replica

PIECES = 4
"""A layer's parameters come in pieces of at most this part of a bucket, as real ones would."""

FLOAT_BYTES = 4

Part: TypeAlias = tuple[float, tuple[nn.Parameter, ...]]

TIED = "tied "
"""Begins the names of tied parameters; those of a layer's own begin with its number."""


@dataclass(frozen=True)
class EmulatedParameters:
    """The parameters of one rank.

    ``of_stage[stage]`` are those that a stage uses. ``layers[name]`` is the layer that uses one, or
    the first layer of its stage where several layers do. ``planned_bytes`` are the bytes of the
    plan, of which the tensors here are a part. ``stages`` and ``holders`` are the stages that use a
    parameter and the ranks that hold it.
    """

    of_stage: dict[int, dict[str, nn.Parameter]]
    layers: dict[str, int]
    planned_bytes: dict[nn.Parameter, float]
    stages: dict[str, tuple[int, ...]]
    holders: dict[str, tuple[int, ...]]


def boundaries_of_crossings(
    crossings: Sequence[Crossing], byte_scale: float
) -> tuple[BoundaryTensors, ...]:
    """The tensors between each two stages, one byte an element."""
    by_ends: dict[tuple[int, int], list[TensorSpec]] = {}
    for crossing in crossings:
        edge = crossing.edge
        whole = edge.goes_whole
        size = max(1, round((edge.bytes.fixed if whole else edge.bytes.at(1)) * byte_scale))
        spec = TensorSpec(
            crossing.name,
            (size,) if whole else (1, size),
            torch.uint8,
            -1 if whole else 0,
            requires_grad=edge.gradient_bytes.at(1) > 0,
        )
        by_ends.setdefault((crossing.producer, crossing.consumer), []).append(spec)
    return tuple(BoundaryTensors(*ends, tuple(specs)) for ends, specs in sorted(by_ends.items()))


def planned_size(
    message: Message, crossings: Mapping[tuple[int, int, str], Crossing]
) -> tuple[float, int]:
    """The bytes that the plan has for a message, and the number of its tensors that have any."""
    size_bytes, tensors = 0.0, 0
    ends = sorted((message.sender_stage, message.receiver_stage))
    for part in message.parts:
        edge = crossings[ends[0], ends[1], part.spec.name].edge
        rows = 1 if part.dim < 0 else len(part.source_rows)
        cost = edge.bytes if message.kind == "F" else edge.gradient_bytes
        size_bytes += cost.at(rows)
        tensors += cost.at(rows) > 0
    return size_bytes, tensors


def program_of(
    stage: int, boundaries: Sequence[BoundaryTensors], emulation: Emulation
) -> StageProgram:
    """What a stage receives and sends; its module is empty."""
    received = [spec for b in boundaries if b.consumer == stage for spec in b.tensors]
    sent = {spec.name: spec for b in boundaries if b.producer == stage for spec in b.tensors}
    stages = emulation.plan.stages
    empty: Any = nn.Module()  # nothing runs it
    return StageProgram(
        stages[stage].layers,
        empty,
        (),
        tuple(received),
        tuple(sent.values()),
        stage == len(stages) - 1,
    )


def parameters_of_rank(emulation: Emulation, stages: Sequence[int]) -> EmulatedParameters:
    """The parameters that the stages of a rank share with other ranks; no others are needed."""
    plan, profile = emulation.plan, emulation.profile
    found = EmulatedParameters({}, {}, {}, {}, {})
    tied: dict[str, nn.Parameter] = {}

    def made(size_bytes: float) -> nn.Parameter:
        elements = max(1, round(size_bytes * emulation.byte_scale / FLOAT_BYTES))
        parameter = nn.Parameter(torch.zeros(elements))
        found.planned_bytes[parameter] = size_bytes
        return parameter

    def add(name: str, parameter: nn.Parameter, stage: int, layer: int) -> None:
        found.of_stage[stage][name] = parameter
        found.layers[name] = layer

    for stage in stages:
        found.of_stage[stage] = {}
        layers, holders = plan.stages[stage].layers, plan.devices_of(stage)
        for layer in layers if len(holders) > 1 else ():
            size = profile.layers[layer].parameter_bytes
            pieces = ceil(size * PIECES / BUCKET_BYTES)
            for piece in range(pieces):
                name = f"{layer}.{piece}"
                add(name, made(size / pieces), stage, layer)
                found.stages[name], found.holders[name] = (stage,), holders
        for shared in profile.shared:
            users = users_of(shared, plan)
            held = holders_of(users, plan)
            if stage not in users or not shared.bytes or len(held) == 1:
                continue
            name = f"{TIED}{shared.name}"
            if name not in tied:
                tied[name] = made(shared.bytes)
            add(name, tied[name], stage, layers.start)
            found.stages[name], found.holders[name] = users, held
    return found


def users_of(shared: SharedParameter, plan: Plan) -> tuple[int, ...]:
    """The stages that use a tied parameter."""
    return tuple(sorted({plan.stage_of_layer(layer) for layer in shared.layers}))


def holders_of(stages: Sequence[int], plan: Plan) -> tuple[int, ...]:
    """The ranks that hold a parameter that ``stages`` use."""
    held = (device for stage in stages for device in plan.devices_of(stage))
    return tuple(dict.fromkeys(held))


def holders_of_any(plan: Plan, profile: ModelProfile) -> list[tuple[int, ...]]:
    """The sets of ranks that may hold a parameter, the same on every rank."""
    own = (plan.devices_of(stage) for stage in range(len(plan.stages)))
    tied = (holders_of(users_of(shared, plan), plan) for shared in profile.shared)
    return list(dict.fromkeys((*own, *tied)))


def stage_times(
    replica: Replica, work: StageWork, parameters: EmulatedParameters, time_scale: float
) -> tuple[Mapping[ActionKind, float], Sequence[Part]]:
    """The ``seconds`` and the ``last`` of an `EmulatedStage`, from the profile and its device."""
    kinds: tuple[ActionKind, ...] = ("F", "B", "I", "W", "R")
    own = parameters.of_stage[replica.stage]
    ends = work.segment_layers
    last: list[Part] = []
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
    return {kind: replica.work.seconds(kind) * time_scale for kind in kinds}, last


@dataclass
class EmulatedStage:
    """Stands in for a stage of a captured model; see `FedRunner`.

    ``seconds`` are those of its actions here, on this rank's rows. ``last`` are the parts of the
    last action that makes gradients: the seconds of each, and the parameters whose gradients are
    complete at its end.
    ``launching`` starts gradient sums within the last backward. ``sleep_until`` takes the time of
    an action: it waits for a moment, and returns it.
    """

    stage: int
    program: StageProgram
    seconds: Mapping[ActionKind, float]
    last: Sequence[Part]
    launching: Callable[[], AbstractContextManager[object]]
    sleep_until: Callable[[float], float]
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
        sent = self._filled(self.program.sent, "F", micro_batch)
        self.sleep_until(start_s + self.seconds["F"])
        return sent

    def _backward(self, kind: ActionKind, micro_batch: int, gradients: Tensors) -> Tensors:
        start_s = time.perf_counter()
        sent = self._filled(self.program.received, "B", micro_batch)
        self._take_time(kind, micro_batch, start_s)
        return sent

    def _without_messages(self, kind: ActionKind, micro_batch: int) -> Tensors:
        self._take_time(kind, micro_batch, time.perf_counter())
        return ()

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

    def _filled(self, specs: Sequence[TensorSpec], kind: str, micro_batch: int) -> Tensors:
        rows = self.inputs.rows[micro_batch]
        return [
            torch.zeros(spec.shape_for(rows), dtype=spec.dtype)
            if kind == "F" or spec.requires_grad
            else None
            for spec in specs
        ]
