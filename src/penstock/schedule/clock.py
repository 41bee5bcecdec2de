"""Times of the actions of a schedule, given the costs of stages and links without contention.

A transfer takes the time that the shape gives and never waits for another. That is enough to
compare orders. `penstock.simulate` predicts the time of a plan on a cluster, with shared links and
gradient reductions.
"""

from dataclasses import dataclass
from itertools import accumulate
from math import inf

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.errors import BadInput
from penstock.schedule.action import ACTION_KINDS, KIND_CODES
from penstock.schedule.concurrent_clock import ConcurrentIteration
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

F, B, I, W, _ = (KIND_CODES[kind] for kind in ACTION_KINDS)  # noqa: E741


@dataclass(frozen=True)
class ActionTimes:
    """Start and end of every action: ``start_s[group][i]`` is that of action ``i`` of the group."""

    start_s: tuple[npt.NDArray[np.float64], ...]
    end_s: tuple[npt.NDArray[np.float64], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max((float(ends.max()) for ends in self.end_s if len(ends)), default=0.0)


def makespan_s(schedule: Schedule, shape: PipelineShape) -> float:
    """Seconds of one iteration, without the optimizer's step.

    >>> from penstock.schedule.families.early_backward import one_f_one_b
    >>> shape = PipelineShape(stages=3, micro_batches=4)
    >>> makespan_s(one_f_one_b(shape), shape)
    18.0
    """
    return times_of(schedule, shape).makespan_s


def times_of(schedule: Schedule, shape: PipelineShape) -> ActionTimes:
    """Start and end of every action, each as early as its order and its dependencies allow."""
    start_s, played = play_as_far_as_possible(schedule, shape)
    for order, stop in zip(schedule.orders, played, strict=True):
        if stop < len(order):
            raise BadInput(f"action {order[stop]} waits for ever; `validate` explains the deadlock")
    if schedule.concurrent:
        spans = ConcurrentIteration(schedule, shape).run()
        columns = [
            tuple(np.array([spans[action][end] for action in order]) for order in schedule.orders)
            for end in (0, 1)
        ]
        return ActionTimes(*columns)
    taken, pairs = seconds_by_kind(shape), zip(start_s, schedule.orders, strict=True)
    end_s = (own_s + taken[order.kinds, order.stages] for own_s, order in pairs)
    return ActionTimes(tuple(start_s), tuple(end_s))


def play_as_far_as_possible(
    schedule: Schedule, shape: PipelineShape
) -> tuple[list[npt.NDArray[np.float64]], list[int]]:
    """The start of every action, and how many are played, of each group.

    A group runs one action at a time here, even if the schedule is concurrent: an order that can be
    played so can also be played with forwards beside backwards.
    """
    first = list(accumulate(map(len, schedule.orders), initial=0))
    cells = shape.stages * shape.micro_batches
    actions = np.concatenate(
        [
            order.kinds * np.int64(cells)
            + order.stages * np.int64(shape.micro_batches)
            + order.micro_batches
            for order in schedule.orders
        ]
    )
    pipe = native.IdealPipe(
        shape.stages, shape.micro_batches, seconds_by_kind(shape), transfers_s(shape)
    )
    start = np.full(len(actions), inf)
    reached = native.play_orders(pipe, first, actions, start)
    played = [stop - begin for stop, begin in zip(reached, first[:-1], strict=True)]
    return np.split(start, first[1:-1]), played


def seconds_by_kind(shape: PipelineShape) -> npt.NDArray[np.float64]:
    """Seconds of an action alone on its device, by kind code and stage."""
    costs = [shape.cost(stage) for stage in range(shape.stages)]
    return np.array([[cost.seconds(kind) for cost in costs] for kind in ACTION_KINDS])


def transfers_s(shape: PipelineShape) -> npt.NDArray[np.float64]:
    """Seconds of the transfer from each stage to the next one; zero within a device group."""
    return np.array(
        [
            shape.cost(s).transfer_s if shape.group_of(s) != shape.group_of(s + 1) else 0.0
            for s in range(shape.stages - 1)
        ]
    )


def memory_peaks_bytes(schedule: Schedule, shape: PipelineShape) -> tuple[float, ...]:
    """The peak of the bytes that the stages of each group have saved.

    A forward allocates when it starts. At its end I frees what W does not need, and B or W frees
    the rest. A stage that recomputes is counted as if it saved everything from its forward on.

    >>> from penstock.schedule.families.early_backward import one_f_one_b
    >>> shape = PipelineShape(stages=3, micro_batches=8)
    >>> memory_peaks_bytes(one_f_one_b(shape), shape)
    (3.0, 2.0, 1.0)
    """
    changes = np.zeros((len(ACTION_KINDS), shape.stages))
    for stage in range(shape.stages):
        cost = shape.cost(stage)
        changes[F, stage] = cost.saved_bytes
        changes[B, stage] = -cost.saved_bytes
        changes[I, stage] = cost.bytes_until_weight_backward - cost.saved_bytes
        changes[W, stage] = -cost.bytes_until_weight_backward
    levels = (np.cumsum(changes[order.kinds, order.stages]) for order in schedule.orders)
    return tuple(max(0.0, float(level.max())) if len(level) else 0.0 for level in levels)
