"""The instances of a pipeline's stages, and how a schedule uses them.

The engines work on *instances* of stages. A pipeline has one for each of its ``S`` stages. A
mirrored one has two: instance ``s`` works on the even micro-batches; instance ``S + s``, on the
devices of stage ``S - 1 - s``, works on the odd ones (Chimera, SC 2021, section 3.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.schedule.action import KIND_CODES, Action
from penstock.schedule.order import Order
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

__all__ = ["Instances", "StageUse", "instances_of", "stages_of_instances", "updating"]

Whole: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

BACKWARD, WEIGHTS = KIND_CODES["B"], KIND_CODES["W"]


class StageUse(NamedTuple):
    """How a schedule uses an instance.

    ``split``: its gradients come with W, not with B. ``versions``: copies of its parameters that
    are kept. ``reduces``: its replicas sum their gradients among themselves. ``predictions``: how
    many times its parameters are predicted for each update.
    """

    split: bool = False
    versions: int = 1
    reduces: bool = True
    predictions: int = 0


@dataclass(frozen=True)
class Instances:
    """The instances of a pipeline: where they are and how they are used.

    ``groups[i]`` is the device group of instance ``i``. ``rounds[i]`` is how many updates of its
    parameters an iteration has; 0 if it has no work.
    """

    stages: int
    mirrored: bool
    groups: tuple[int, ...]
    uses: tuple[StageUse, ...]
    rounds: tuple[int, ...]
    micro_batches_per_update: int = 0

    def of(self, action: Action) -> int:
        """The instance that runs ``action``."""
        return action.stage + self.stages * (action.micro_batch % 2 if self.mirrored else 0)

    def numbers_in(self, order: Order) -> Whole:
        """The instance that runs each action of an order."""
        stages = order.stages.astype(np.int64)
        return stages + self.stages * (order.micro_batches % 2) if self.mirrored else stages

    def steps_of(self, group: int) -> int:
        """How many optimizer steps the devices of a group take in an iteration."""
        return self.rounds[self.members[group][0]] if self.micro_batches_per_update else 1

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The instances of every device group, in ascending order."""
        found: list[list[int]] = [[] for _ in range(max(self.groups) + 1)]
        for instance, group in enumerate(self.groups):
            found[group].append(instance)
        return tuple(map(tuple, found))


def stages_of_instances(plan: Plan) -> tuple[Stage, ...]:
    """The stages of ``plan``, each on the devices of its instance.

    >>> halves = Stage(range(0, 1), (0,), (1,)), Stage(range(1, 2), (1,), (1,))
    >>> plan = Plan(halves, micro_batches=2, micro_batch_size=1, schedule="1f1b")
    >>> stages_of_instances(plan) == halves
    True
    """
    if not plan.mirrored:
        return plan.stages
    opposite = (
        replace(stage, devices=other.devices, slices=other.slices)
        for stage, other in zip(plan.stages, reversed(plan.stages), strict=True)
    )
    return (*plan.stages, *opposite)


def instances_of(schedule: Schedule, shape: PipelineShape) -> Instances:
    """The instances of a pipeline that runs ``schedule``.

    Raises:
        BadInput: updates without a flush where a device group holds several stages, or where some
            backwards of a stage are split and others not.
    """
    weights = schedule.weights
    directions = (0, 1) if shape.mirrored else (0,)
    groups = [
        shape.group_of(stage, direction)
        for direction in directions
        for stage in range(shape.stages)
    ]
    if weights.micro_batches_per_update and len(set(groups)) < len(groups):
        raise BadInput(
            f"weights are updated every {weights.micro_batches_per_update} micro-batches and "
            f"device groups hold several stages, {groups}; give each stage devices of its own, or "
            f"use a schedule that updates once an iteration"
        )
    bare = Instances(shape.stages, shape.mirrored, tuple(groups), (), ())
    splits, rounds = [False] * len(groups), [0] * len(groups)
    for order in schedule.orders:
        instance = bare.numbers_in(order)
        marked = updating(order, instance, weights.micro_batches_per_update)
        for index in np.flatnonzero(marked).tolist():
            number, split = int(instance[index]), bool(order.kinds[index] == KIND_CODES["W"])
            if rounds[number] and split != splits[number]:
                raise BadInput(
                    f"stage {number} updates its weights now after B, now after W; a schedule "
                    f"without a flush must split all backwards of a stage or none"
                )
            splits[number] = split
            rounds[number] += 1
    uses = (
        StageUse(
            split,
            weights.versions_of(number % shape.stages),
            not shape.mirrored,
            weights.predictions_of(number % shape.stages),
        )
        for number, split in enumerate(splits)
    )
    return replace(
        bare,
        uses=tuple(uses),
        rounds=tuple(rounds),
        micro_batches_per_update=weights.micro_batches_per_update,
    )


def updating(order: Order, instance: Sequence[int] | Whole, per_update: int) -> Flags:
    """Marks the actions that make the last gradients before an update of their instance.

    That is the last B or W of each instance or, without a flush, every ``per_update``-th one.
    """
    marked = np.zeros(len(order), dtype=np.bool_)
    gradient = (order.kinds == BACKWARD) | (order.kinds == WEIGHTS)
    held: list[int] = np.unique(instance).tolist()
    for number in held:
        mine = np.flatnonzero(gradient & (np.asarray(instance) == number))
        marked[mine[per_update - 1 :: per_update] if per_update else mine[-1:]] = True
    return marked
