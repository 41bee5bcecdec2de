"""The orders of a schedule as one flat array of words, and what else scoring needs of them.

A word is an action as one integer, as the core's engine reads it. From the lowest bit on it has the
kind (3 bits), whether the action makes the last gradients before an update (1), the instance (20)
and the micro-batch. A STEP, a WAIT and a HOLD are words too. In a STEP the micro-batch is the
iteration. In a WAIT, which waits for a step, it is the number of that step. A HOLD precedes a
forward that runs beside backwards; there it is how many words the other stream may have left when
the forward starts.

Orders of the early-backward family are valid by construction: depths never grow downstream and
respect every limit (a property test checks them with `penstock.schedule.validate`). So their words
are written directly. Orders of all other schedules are made as actions and validated first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core.native import Holding, Orders
from penstock.plan.ordering import check_choices, order_of
from penstock.plan.plan import Plan
from penstock.schedule.action import ACTION_KINDS, KIND_CODES
from penstock.schedule.order import Order
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule
from penstock.simulate.instances import Instances, StageUse, dealt, instances_of, updating
from penstock.simulate.memory import held_while

Whole: TypeAlias = npt.NDArray[np.int64]

STEP = len(ACTION_KINDS)
WAIT, HOLD = STEP + 1, STEP + 2

KIND_MASK, UPDATES, INSTANCE_SHIFT, MICRO_SHIFT = 7, 8, 4, 24

FORWARD, BACKWARD, RECOMPUTE = KIND_CODES["F"], KIND_CODES["B"], KIND_CODES["R"]


@dataclass(frozen=True, eq=False)
class FlatOrders:
    """The words of every compute stream, group after group.

    ``words[start[k] : start[k + 1]]`` are those of stream ``k``; each group has ``streams_each``.
    ``held[group]`` are the states of memory of the group, as of `memory.held_while`.
    ``micro_batches`` counts those of all iterations.
    """

    start: Whole
    words: Whole
    instances: Instances
    micro_batches: int
    iterations: int
    held: tuple[tuple[Holding, ...], ...]
    concurrent: bool = False

    @property
    def streams_each(self) -> int:
        """The number of compute streams of a device."""
        return 2 if self.concurrent else 1

    @cached_property
    def in_core(self) -> Orders:
        """The same for the core's engine."""
        instances = self.instances
        rounds = [rounds * self.iterations for rounds in instances.rounds]
        repeated = (self.micro_batches, self.iterations)
        own = (self.start, self.words, self.streams_each, instances.groups, rounds)
        return Orders(*own, repeated, self.held)


def orders_of_plan(plan: Plan) -> FlatOrders:
    """The orders of one iteration of ``plan``; they are valid."""
    check_choices(plan)
    family, shape = FAMILIES.get(plan.schedule), plan.shape()
    limited = plan.schedule == "gpipe" and plan.in_flight_limit
    in_turn = any(stage.in_turn for stage in plan.stages)
    is_special = limited or shape.placement or shape.mirrored or in_turn
    if family is None or not family.is_early_backward or is_special:
        schedule = dealt(order_of(plan), plan)
        instances = instances_of(schedule, plan)
        held = held_while(schedule, instances)
        return flatten(schedule, instances, plan.micro_batches, held=held)
    orders = [
        early_backward_words(plan.micro_batches, depth, stage.recompute)
        for stage, depth in zip(plan.stages, family.depths(shape), strict=True)
    ]
    words = np.concatenate([words for words, _ in orders])
    sizes = [len(words) for words, _ in orders]
    start = np.array(list(accumulate(sizes, initial=0)))
    words |= np.repeat(np.arange(len(orders)) << INSTANCE_SHIFT, sizes)
    words[start[1:] - 1] = STEP
    return FlatOrders(
        start,
        words,
        one_instance_a_stage(len(orders)),
        plan.micro_batches,
        1,
        tuple(held for _, held in orders),
    )


@lru_cache(maxsize=256)
def one_instance_a_stage(stages: int) -> Instances:
    """The instances of a pipeline with one stage on each device group and whole backwards."""
    once = (1,) * stages
    copies = tuple((stage,) for stage in range(stages))
    return Instances(copies, tuple(range(stages)), (StageUse(),) * stages, once)


@lru_cache(maxsize=256)
def early_backward_words(
    micro_batches: int, depth: int, recompute: bool
) -> tuple[Whole, tuple[Holding, ...]]:
    """The words of stage 0 in `early_backward.order_of_stage`, and the states of its memory.

        F(0) .. F(K-1)   [R(0)] B(0) F(K)   [R(1)] B(1) F(K+1)  ..  [R(M-1)] B(M-1)

    With depth 1 each backward directly follows its forward, so nothing is recomputed.
    """
    recomputes = recompute and depth > 1
    cycle = [RECOMPUTE, BACKWARD, FORWARD] if recomputes else [BACKWARD, FORWARD]
    kind = np.concatenate([np.full(depth, FORWARD), np.tile(cycle, micro_batches)])
    micro = np.concatenate(
        [np.arange(depth), np.repeat(np.arange(micro_batches), len(cycle))], dtype=np.int64
    )
    micro[depth:][kind[depth:] == FORWARD] += depth
    kept = micro < micro_batches
    words = np.append(kind[kept] | micro[kept] << MICRO_SHIFT, STEP)
    words[-2] |= UPDATES
    held = ((0, depth), (1, depth - 1)) if recomputes else ((depth, 0),)
    return words, tuple(Holding(0, [now]) for now in held)


def flatten(
    schedule: Schedule,
    instances: Instances,
    micro_batches: int,
    *,
    iterations: int = 1,
    held: tuple[tuple[Holding, ...], ...] = (),
) -> FlatOrders:
    """The orders of ``schedule``, repeated ``iterations`` times with ``micro_batches`` in each."""
    streams: list[Whole] = []
    for order in schedule.orders:
        parts = stream_words(order, instances, schedule.concurrent, iterations)
        streams += [
            repeated_words(part, micro_batches, len(parts[-1]), iterations) for part in parts
        ]
    return FlatOrders(
        np.array(list(accumulate(map(len, streams), initial=0)), dtype=np.int64),
        np.concatenate(streams),
        instances,
        micro_batches * iterations,
        iterations,
        held,
        schedule.concurrent,
    )


def stream_words(
    order: Order, instances: Instances, concurrent: bool, iterations: int
) -> Sequence[Whole]:
    """The words of each compute stream of a device group, in the first iteration."""
    instance = instances.numbers_in(order)
    per_update = instances.micro_batches_per_update
    marked = updating(order, instance, per_update)
    words = (
        order.kinds.astype(np.int64)
        | np.where(marked, UPDATES, 0)
        | instance << INSTANCE_SHIFT
        | order.micro_batches.astype(np.int64) << MICRO_SHIFT
    )
    if not concurrent:
        return [with_steps(words, per_update)]
    forwards = order.kinds == FORWARD
    others = with_steps(words[~forwards], per_update)
    # How many words of the other stream end with the action before each forward.
    ended = np.cumsum(~forwards)
    steps = np.cumsum(marked) if per_update else np.zeros(len(order), dtype=np.int64)
    last = np.maximum.accumulate(np.where(forwards, 0, np.arange(len(order))))
    before = ended + np.where(ended > 0, steps[last] - marked[last] * (per_update > 0), 0)
    holds = HOLD | (len(others) * iterations - before[forwards]) << MICRO_SHIFT
    held = np.stack((holds, words[forwards]), axis=1).ravel()
    return [np.concatenate((np.array([WAIT], dtype=np.int64), held)), others]


def with_steps(words: Whole, per_update: int) -> Whole:
    """The words with a STEP at the end or, without a flush, after the gradients of every update.

    Without a flush, a STEP has the micro-batch of the action before it.
    """
    if not per_update:
        return np.append(words, STEP)
    last = np.flatnonzero(words & UPDATES)
    return np.insert(words, last + 1, STEP | words[last] >> MICRO_SHIFT << MICRO_SHIFT)


def repeated_words(words: Whole, micro_batches: int, others: int, iterations: int) -> Whole:
    """The words of several iterations; micro-batches and awaited steps are numbered throughout.

    ``others`` is the number of words that each iteration adds to the stream that a HOLD refers to.
    """
    if iterations == 1:
        return words
    kinds = words & KIND_MASK
    more = np.where(kinds == WAIT, 1, np.where(kinds == HOLD, -others, micro_batches))
    return np.concatenate([words + (more * i << MICRO_SHIFT) for i in range(iterations)])
