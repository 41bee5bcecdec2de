"""Tensors and parameters with the sizes of a profile, or in proportion to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import nn

from penstock.capture.stage_program import StageProgram, TensorSpec
from penstock.cluster.collectives import BUCKET_BYTES
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile, SharedParameter
from penstock.rehearse.emulation import Crossing, Emulation
from penstock.runtime.transport.messages import BoundaryTensors, Message

__all__ = [
    "TIED",
    "EmulatedParameters",
    "boundaries_of_crossings",
    "holders_of_any",
    "mark_of",
    "parameters_of_rank",
    "planned_size",
    "program_of",
]

PIECES = 4
"""A layer's parameters come in pieces of at most this part of a bucket, as real ones would."""

FLOAT_BYTES = 4

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


def mark_of(kind: str, stage: int, micro_batch: int) -> int:
    """The byte that fills what a stage sends for a micro-batch, so that a mix-up is noticed."""
    return (1 + 7 * stage + 31 * micro_batch + (101 if kind == "B" else 0)) % 251


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
