"""Plays a workload by the compiled engine: `penstock.simulate.event_loop` on flat arrays."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.simulate.arrays import Arrays, arrays_of
from penstock.simulate.layout import ACTION_SPAN, ITEM_SPAN, KIND_MASK, STEP
from penstock.simulate.orders import FlatOrders, flatten
from penstock.simulate.trace import Span, Trace
from penstock.simulate.workload import Parts, Workload

__all__ = ["iteration_s", "play"]

Spans: TypeAlias = npt.NDArray[np.float64]
"""A start and an end in each row, in seconds."""


def iteration_s(parts: Parts, orders: FlatOrders) -> float:
    """Seconds of all iterations, without making a trace."""
    from penstock.simulate.event_loop import run

    arrays = arrays_of(parts, orders)
    return run(arrays.whole, arrays.real)


def play(workload: Workload) -> Trace:
    """Play all iterations; equal to `penstock.simulate.plain.play`."""
    from penstock.simulate.event_loop import run

    orders = orders_of(workload)
    arrays = arrays_of(workload.parts, orders, record=True)
    end_s = run(arrays.whole, arrays.real)
    kinds = kinds_of_words(workload, orders)
    words = spans(arrays, ACTION_SPAN, len(kinds))
    messages = len(workload.messages) * workload.micro_batches
    buckets = sum(len(group.buckets) * group.rounds for group in workload.reductions)
    items = spans(arrays, ITEM_SPAN, messages + buckets)
    return Trace(
        actions=listed(words[kinds < STEP]),
        messages=listed(items[:messages]),
        buckets=listed(items[messages:]),
        steps=listed(words[kinds == STEP]),
        iteration_s=end_s,
    )


def orders_of(workload: Workload) -> FlatOrders:
    """The orders of a workload, flat."""
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


def spans(arrays: Arrays, field: int, count: int) -> Spans:
    """``count`` pairs of start and end."""
    first = arrays.whole[field]
    return arrays.real[first : first + 2 * count].reshape(-1, 2)


def listed(rows: Spans) -> tuple[Span, ...]:
    """Spans as tuples."""
    pairs: list[list[float]] = rows.tolist()
    return tuple((start, end) for start, end in pairs)
