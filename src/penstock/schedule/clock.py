"""When each action of a schedule runs, given the costs of the stages and links without contention.

A transfer takes the time that the shape gives and never waits for another. That is enough to
compare orders. `penstock.simulate` predicts the time of a plan on a cluster, with shared links and
gradient reductions.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import BadInput
from penstock.kernels import compiled
from penstock.schedule.action import ACTION_KINDS, KIND_CODES
from penstock.schedule.concurrent_clock import spans_side_by_side
from penstock.schedule.order import Order
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

__all__ = ["ActionTimes", "makespan_s", "memory_peaks_bytes", "play_as_far_as_possible", "times_of"]

FEW_ACTIONS = 20_000
"""Schedules with more actions use the compiled loop; below, loading numba would take longer."""

F, B, I, W, R = (KIND_CODES[kind] for kind in ACTION_KINDS)  # noqa: E741


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

    Raises:
        BadInput: the schedule deadlocks.
    """
    return times_of(schedule, shape).makespan_s


def times_of(schedule: Schedule, shape: PipelineShape) -> ActionTimes:
    """Start and end of every action, each as early as its order and its dependencies allow.

    Raises:
        BadInput: the schedule deadlocks.
    """
    streams, start, reached = play_as_far_as_possible(schedule, shape)
    taken = seconds_by_kind(shape)
    starts: list[npt.NDArray[np.float64]] = []
    ends: list[npt.NDArray[np.float64]] = []
    begin = 0
    for stream, stop in zip(streams, reached, strict=True):
        if stop < begin + len(stream):
            raise BadInput(
                f"action {stream[stop - begin]} waits for ever; `validate` explains the deadlock"
            )
        own = start[begin : begin + len(stream)]
        starts.append(own)
        ends.append(own + taken[stream.kinds, stream.stages])
        begin += len(stream)
    if schedule.concurrent:
        return times_side_by_side(schedule, shape)
    return ActionTimes(tuple(starts), tuple(ends))


def times_side_by_side(schedule: Schedule, shape: PipelineShape) -> ActionTimes:
    """`times_of` for schedules whose forwards run beside backwards (see `concurrent_clock`)."""
    spans = spans_side_by_side(schedule, shape)
    columns = [
        tuple(np.array([spans[action][end] for action in order]) for order in schedule.orders)
        for end in (0, 1)
    ]
    return ActionTimes(*columns)


def play_as_far_as_possible(
    schedule: Schedule, shape: PipelineShape
) -> tuple[tuple[Order, ...], npt.NDArray[np.float64], list[int]]:
    """The orders, the start of every action, and the index at which each order stops.

    A group runs one action at a time here, even if the schedule is concurrent: an order that can be
    played so can also be played with forwards beside backwards.
    """
    streams = schedule.orders
    stages, micro_batches = shape.stages, shape.micro_batches
    first = np.cumsum([0, *map(len, streams)])
    kind = np.concatenate([stream.kinds for stream in streams]).astype(np.int64)
    stage = np.concatenate([stream.stages for stream in streams]).astype(np.int64)
    micro = np.concatenate([stream.micro_batches for stream in streams]).astype(np.int64)
    cells = stages * micro_batches
    cell = stage * micro_batches + micro
    ends = np.full(ROWS * cells, inf)
    ends[RECOMPUTE * cells :] = -inf
    ends[RECOMPUTE * cells + cell[kind == R]] = inf
    home = np.full(2 * cells, -1, dtype=np.int64)
    stream_of = np.repeat(np.arange(len(streams)), np.diff(first))
    gradients = (kind == B) | (kind == I)
    home[FORWARD * cells + cell[kind == F]] = stream_of[kind == F]
    home[GRADIENT * cells + cell[gradients]] = stream_of[gradients]
    seconds = seconds_by_kind(shape).ravel()
    start = np.full(len(kind), inf)
    flat = (first, kind, stage, micro, home, seconds, transfers_s(shape))
    if len(kind) > FEW_ACTIONS:
        orders = Streams(stages, micro_batches, *flat)
        return streams, start, compiled(play)(orders, ends, start)
    listed = start.tolist()
    orders = Streams(stages, micro_batches, *(values.tolist() for values in flat))
    reached = play(orders, ends.tolist(), listed)
    return streams, np.array(listed), reached


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
    """For each group the peak of the bytes that its stages have saved.

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


FORWARD, GRADIENT, RECOMPUTE = range(3)
ROWS = 3
"""Rows of ``ends``: the end of F, of B or I, and of R, for every stage and micro-batch."""


class Streams(NamedTuple):
    """Orders to play, as lists or arrays.

    Stream ``k`` is the actions ``first[k]`` to ``first[k + 1] - 1`` of ``kind``, ``stage`` and
    ``micro_batch``. ``home`` holds the stream of every F, then of every B or I; -1 stands for none.
    An action takes ``seconds[kind * stages + s]``, and a transfer from stage ``s`` to the next or
    back ``transfer[s]``.
    """

    stages: int
    micro_batches: int
    first: Any
    kind: Any
    stage: Any
    micro_batch: Any
    home: Any
    seconds: Any
    transfer: Any


def play_streams(orders, ends, start):
    """Write the start of every action that can be played; return how far each stream got.

    The actions of a stream run one after the other, each as soon as what it needs has ended. On
    entry ``ends[row * cells + s * micro_batches + m]`` is infinite where an action of the schedule
    will set it, and minus infinity elsewhere.
    """
    stages, micro_batches, first = orders.stages, orders.micro_batches, orders.first
    kind, stage, home = orders.kind, orders.stage, orders.home
    seconds, transfer = orders.seconds, orders.transfer
    cells = stages * micro_batches
    streams = len(first) - 1
    reached = [first[k] for k in range(streams)]
    free = [0.0 for _ in range(streams)]
    todo = [k for k in range(streams)]
    listed = [True for _ in range(streams)]
    while len(todo) > 0:
        k = todo.pop()
        listed[k] = False
        while reached[k] < first[k + 1]:
            i = reached[k]
            code, s = kind[i], stage[i]
            cell = s * micro_batches + orders.micro_batch[i]
            ready = free[k]
            if code == 0:
                if s > 0:
                    ready = max(ready, ends[cell - micro_batches] + transfer[s - 1])
            elif code == 3:
                ready = max(ready, ends[cells + cell])
            else:
                ready = max(ready, ends[cell])
                if code != 4:
                    ready = max(ready, ends[2 * cells + cell])
                    if s + 1 < stages:
                        ready = max(ready, ends[cells + cell + micro_batches] + transfer[s])
            if ready > 1e300:
                break
            start[i] = ready
            free[k] = ready + seconds[code * stages + s]
            reached[k] = i + 1
            wake = -1
            if code == 0:
                ends[cell] = free[k]
                wake = home[cells + cell]
                if wake >= 0 and not listed[wake]:
                    todo.append(wake)
                    listed[wake] = True
                wake = home[cell + micro_batches] if s + 1 < stages else -1
            elif code == 1 or code == 2:
                ends[cells + cell] = free[k]
                wake = home[cells + cell - micro_batches] if s > 0 else -1
            elif code == 4:
                ends[2 * cells + cell] = free[k]
            if wake >= 0 and not listed[wake]:
                todo.append(wake)
                listed[wake] = True
    return reached


play: Callable[..., list[int]] = play_streams
"""`play_streams`, with a type."""
