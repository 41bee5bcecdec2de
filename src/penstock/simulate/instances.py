"""The instances of a pipeline's stages, and how a schedule uses them.

The engines work on *instances* of stages. A pipeline has one for each of its ``S`` stages. A
mirrored one has two: instance ``s`` works on the even micro-batches; instance ``S + s``, on the
devices of stage ``S - 1 - s``, works on the odd ones (Chimera, SC 2021, section 3.1). A stage whose
devices take micro-batches in turn has one for each device, which is a group of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.schedule.action import KIND_CODES, Action
from penstock.schedule.order import Order, order_from_arrays
from penstock.schedule.schedule import Schedule

Whole: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

BACKWARD, WEIGHTS = KIND_CODES["B"], KIND_CODES["W"]


class StageUse(NamedTuple):
    """Use of an instance by a schedule.

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

    ``copies[s]`` are the instances of stage ``s``, which take its micro-batches in turn; the first
    is instance ``s``. ``groups[i]`` is the device group of instance ``i``. ``rounds[i]`` is how
    many updates of its parameters an iteration has; 0 if it has no work.
    """

    copies: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]
    uses: tuple[StageUse, ...]
    rounds: tuple[int, ...]
    micro_batches_per_update: int = 0

    def of(self, action: Action) -> int:
        own = self.copies[action.stage]
        return own[action.micro_batch % len(own)]

    def numbers_in(self, order: Order) -> Whole:
        """The instance that runs each action of an order."""
        found = order.stages.astype(np.int64)
        for stage, own in enumerate(self.copies):
            if len(own) > 1:
                mine = order.stages == stage
                found[mine] = np.array(own)[order.micro_batches[mine] % len(own)]
        return found

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        stages = {one: stage for stage, own in enumerate(self.copies) for one in own}
        return tuple(stages[instance] for instance in range(len(self.groups)))

    @property
    def in_turn(self) -> bool:
        """True if several instances of some stage take its micro-batches in turn."""
        return len(self.groups) > len(self.copies)

    def steps_of(self, group: int) -> int:
        """The number of optimizer steps of the devices of a group in an iteration."""
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
        # A stage whose devices take turns is one on each of them.
        ways = [
            [replace(s, devices=(device,), slices=s.slices[:1]) for device in s.devices]
            if s.in_turn
            else [s]
            for s in plan.stages
        ]
        return (*(way[0] for way in ways), *(one for way in ways for one in way[1:]))
    opposite = (
        replace(stage, devices=other.devices, slices=other.slices)
        for stage, other in zip(plan.stages, reversed(plan.stages), strict=True)
    )
    return (*plan.stages, *opposite)


def dealt(schedule: Schedule, plan: Plan) -> Schedule:
    """The schedule, with an order for each device of a stage that takes micro-batches in turn."""
    orders = list(schedule.orders)
    for number, stage in enumerate(plan.stages):
        if stage.in_turn:
            group = plan.shape().group_of(number)
            whole = schedule.orders[group]
            turn = whole.micro_batches % stage.replicas
            own = [
                order_from_arrays(whole.kinds[mine], whole.stages[mine], whole.micro_batches[mine])
                for mine in (turn == k for k in range(stage.replicas))
            ]
            orders[group] = own[0]
            orders += own[1:]
    return replace(schedule, orders=tuple(orders))


def copies_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The instances of every stage; those beyond the first are numbered after all stages."""
    stages = len(plan.stages)
    if plan.mirrored:
        return tuple((stage, stages + stage) for stage in range(stages))
    more = count(stages)
    return tuple(
        (number, *(next(more) for _ in range(stage.replicas - 1))) if stage.in_turn else (number,)
        for number, stage in enumerate(plan.stages)
    )


def instances_of(schedule: Schedule, plan: Plan) -> Instances:
    """The instances of a plan that runs ``schedule``, which is `dealt`."""
    weights, shape, copies = schedule.weights, plan.shape(), copies_of(plan)
    groups = [*chain.from_iterable(shape.ways), *range(shape.groups, len(schedule.orders))]
    if weights.micro_batches_per_update and len(set(groups)) < len(groups):
        raise BadInput(
            f"weights are updated every {weights.micro_batches_per_update} micro-batches and "
            f"device groups hold several stages, {groups}; give each stage devices of its own, or "
            f"use a schedule that updates once an iteration"
        )
    bare = Instances(copies, tuple(groups), (), ())
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
            weights.versions_of(bare.stage_of[number]),
            not shape.mirrored,
            weights.predictions_of(bare.stage_of[number]),
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
