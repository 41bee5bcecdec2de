"""Plays a workload with the engine of the core, whose rules are in `core/play.hpp`."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.simulate.orders import KIND_MASK, MICRO_SHIFT, STEP, FlatOrders, flatten
from penstock.simulate.trace import Span, Trace
from penstock.simulate.workload import Parts, Workload

Spans: TypeAlias = npt.NDArray[np.float64]
"""A start and an end in each row, in seconds."""


def played_s(parts: Parts, orders: FlatOrders) -> float:
    """Seconds of all iterations; makes no trace."""
    return native.iteration_s(parts.in_core, orders.in_core)


def play(workload: Workload) -> Trace:
    """Play all iterations. The schedule must be valid; otherwise the trace ends at the deadlock."""
    orders = orders_of(workload)
    played = native.play(workload.parts.in_core, orders.in_core, workload.steps_together)
    kinds, words = kinds_of_words(workload, orders), played.actions
    messages = len(workload.messages) * workload.micro_batches
    return Trace(
        actions=spans_listed(words[kinds < STEP]),
        messages=spans_listed(played.items[:messages]),
        buckets=spans_listed(played.items[messages:]),
        steps=spans_listed(words[kinds == STEP]),
        iteration_s=played.end_s,
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a play without its spans.

    ``ends_s[i]`` is when the last work of iteration ``i`` ends. ``busy_s`` are the seconds of
    compute of each device with work, in the order of their numbers.
    """

    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]


def play_in_short(workload: Workload, micro_batches: int, iterations: int) -> Summary:
    """Play iterations of ``micro_batches`` each, without a trace: for the largest plans."""
    orders = orders_of(workload)
    spans = native.play(workload.parts.in_core, orders.in_core, workload.steps_together).actions
    each, ends_s, busy_s = workload.streams_each, np.zeros(iterations), dict[int, float]()
    number = (orders.words >> MICRO_SHIFT) // micro_batches
    is_wait, first = (orders.words & KIND_MASK) > STEP, 0
    for work in workload.devices:
        start, end = orders.start[work.group * each], orders.start[work.group * each + each]
        rows = spans[first : first + end - start]
        first += end - start
        np.maximum.at(ends_s, np.where(is_wait[start:end], 0, number[start:end]), rows[:, 1])
        # One after another, as a timeline's events are added up: to the last digit the same.
        busy_s[work.device] = float(np.add.accumulate(rows[:, 1] - rows[:, 0])[-1])
    of_devices = tuple(busy_s[device] for device in sorted(busy_s))
    return Summary(tuple(np.maximum.accumulate(ends_s).tolist()), of_devices)


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


def spans_listed(rows: Spans) -> tuple[Span, ...]:
    pairs: list[list[float]] = rows.tolist()
    return tuple((start, end) for start, end in pairs)
