"""Plays a workload with the compiled engine (`penstock.simulate.event_loop`)."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.kernels import compiled
from penstock.simulate.assembly import number_through
from penstock.simulate.assembly_tables import Joined
from penstock.simulate.gradients import TiedGroup
from penstock.simulate.layout import KIND_MASK, MICRO_SHIFT, STEP, WAIT, real_list
from penstock.simulate.orders import FlatOrders, flatten
from penstock.simulate.trace import Span, Trace
from penstock.simulate.workload import Parts, Workload

__all__ = ["Summary", "iteration_s", "orders_of", "play", "play_in_short", "state_of"]

Spans: TypeAlias = npt.NDArray[np.float64]
"""A start and an end in each row, in seconds."""


def iteration_s(parts: Parts, orders: FlatOrders) -> float:
    """Seconds of all iterations; makes no trace."""
    from penstock.simulate.event_loop import play_to_the_end

    return compiled(play_to_the_end)(state_of(parts, orders))


def play(workload: Workload) -> Trace:
    """Play all iterations. The schedule must be valid; otherwise the trace ends at the deadlock."""
    from penstock.simulate.event_loop import play_to_the_end

    orders = orders_of(workload)
    state = state_of(workload.parts, orders, record=True)
    end_s = compiled(play_to_the_end)(state)
    kinds = kinds_of_words(workload, orders)
    words = spans(state, "action_span", len(kinds))
    messages = len(workload.messages) * workload.micro_batches
    buckets = sum(len(group.buckets) * group.rounds for group in workload.reductions)
    items = spans(state, "item_span", messages + buckets)
    return Trace(
        actions=listed(words[kinds < STEP]),
        messages=listed(items[:messages]),
        buckets=listed(items[messages:]),
        steps=listed(words[kinds == STEP]),
        iteration_s=end_s,
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a play without its spans.

    ``ends_s[i]`` is when the last work of iteration ``i`` ends. ``busy_s`` are the seconds of
    compute of each device.
    """

    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]


def play_in_short(workload: Workload, micro_batches: int, iterations: int) -> Summary:
    """Play iterations of ``micro_batches`` each, without a trace: for the largest plans."""
    from penstock.simulate.event_loop import play_to_the_end

    orders = orders_of(workload)
    state = state_of(workload.parts, orders, record=True)
    compiled(play_to_the_end)(state)
    each, ends_s, busy_s = workload.streams_each, np.zeros(iterations), list[float]()
    number = (orders.words >> MICRO_SHIFT) // micro_batches
    is_wait, first = (orders.words & KIND_MASK) >= WAIT, 0
    for work in workload.devices:
        start, end = orders.start[work.group * each], orders.start[work.group * each + each]
        rows = spans(state, "action_span", first + end - start)[first:]
        rows[is_wait[start:end]] = 0.0
        first += end - start
        np.maximum.at(ends_s, np.where(is_wait[start:end], 0, number[start:end]), rows[:, 1])
        busy_s.append(float((rows[:, 1] - rows[:, 0]).sum()))
    return Summary(tuple(np.maximum.accumulate(ends_s).tolist()), tuple(busy_s))


def orders_of(workload: Workload) -> FlatOrders:
    """The flat orders of a workload."""
    return flatten(
        workload.schedule,
        workload.instances,
        workload.micro_batches_per_iteration,
        iterations=workload.iterations,
    )


def kinds_of_words(workload: Workload, orders: FlatOrders) -> npt.NDArray[np.int64]:
    """The kind of every word of every stream, device after device."""
    each, kinds = workload.streams_each, orders.words & KIND_MASK
    return np.concatenate(
        [
            kinds[orders.start[work.group * each] : orders.start[work.group * each + each]]
            for work in workload.devices
        ]
    )


def spans(state: npt.NDArray[np.int64], name: str, count: int) -> Spans:
    """The first ``count`` spans of a list of the state."""
    return real_list(state, name)[: 2 * count].reshape(-1, 2)


def listed(rows: Spans) -> tuple[Span, ...]:
    """Spans as tuples."""
    pairs: list[list[float]] = rows.tolist()
    return tuple((start, end) for start, end in pairs)


Whole: TypeAlias = npt.NDArray[np.int64]
Real: TypeAlias = npt.NDArray[np.float64]

NO_WHOLE = np.zeros(0, dtype=np.int64)
NO_REAL = np.zeros(0)


def state_of(parts: Parts, orders: FlatOrders, *, record: bool = False) -> Whole:
    """The array of `penstock.simulate.layout` before the play starts.

    ``record`` makes space for the spans of all events.
    """
    return compiled(number_through)(joined(parts, orders, record=record))


def joined(parts: Parts, orders: FlatOrders, *, record: bool) -> Joined:
    """The parts as joined arrays."""
    stages, boundaries, ties = parts.stages, parts.boundaries, parts.ties
    return Joined(
        micro_batches=orders.micro_batches,
        streams_each=orders.streams_each,
        records_spans=int(record),
        instances=len(stages),
        device_groups=(len(orders.start) - 1) // orders.streams_each,
        hosts=len(parts.host_slots),
        has_links=any(parts.separate_links),
        boundaries=len(boundaries),
        ties=len(ties),
        host_slots=np.array(parts.host_slots, dtype=np.int64),
        half_duplex=np.array(parts.half_duplex, dtype=np.int64),
        separate_links=np.array(parts.separate_links, dtype=np.int64),
        order_start=orders.start,
        order_words=orders.words,
        groups=np.array(orders.instances.groups, dtype=np.int64),
        rounds=np.array(orders.instances.rounds, dtype=np.int64) * orders.iterations,
        stage=np.concatenate([stage.whole for stage in stages]),
        stage_seconds=np.concatenate([stage.real for stage in stages]),
        ends=np.array([end for p, c, _ in boundaries for end in (p, c)], dtype=np.int64),
        boundary=np.concatenate([made.whole for *_, made in boundaries] or [NO_WHOLE]),
        boundary_seconds=np.concatenate([made.real for *_, made in boundaries] or [NO_REAL]),
        tie=np.concatenate([whole_of_tie(tie) for tie in ties] or [NO_WHOLE]),
        tie_seconds=np.concatenate([real_of_tie(tie) for tie in ties] or [NO_REAL]),
    )


def whole_of_tie(tie: TiedGroup) -> Whole:
    """The integers of a tie, as `Joined` describes them."""
    outgoing, incoming = tie.ports.outgoing, tie.ports.incoming
    buckets = sum(share.buckets for share in tie.shares)
    counts = (len(tie.stages), buckets, len(outgoing), len(incoming))
    return np.array([*counts, *tie.stages, *outgoing, *incoming], dtype=np.int64)


def real_of_tie(tie: TiedGroup) -> Real:
    """The seconds of a tie, as `Joined` describes them."""
    return np.array([share.seconds for share in tie.shares for _ in range(share.buckets)])
