"""Plays a workload with the engine of the core, whose rules are in `core/play.hpp`."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.simulate.orders import KIND_MASK, MICRO_SHIFT, STEP, FlatOrders, Whole, flatten
from penstock.simulate.trace import Span, Trace
from penstock.simulate.workload import Parts, Workload

Spans: TypeAlias = npt.NDArray[np.float64]
"""A start and an end in each row, in seconds."""


def played_s(parts: Parts, orders: FlatOrders) -> float:
    """Seconds of all iterations; makes no trace."""
    return native.iteration_s(parts.in_core, orders.in_core)


def play(workload: Workload) -> Trace:
    """Play all iterations. The schedule must be valid; otherwise the trace ends at the deadlock."""
    return played(workload).trace()


@dataclass(frozen=True)
class Played:
    """A played workload: the span of each of ``words``, and of its messages and then buckets.

    ``words`` has those of all compute streams for each device, device after device.
    """

    workload: Workload
    words: list[Whole]
    spans: Spans
    items: Spans
    end_s: float

    def trace(self) -> Trace:
        """The spans by kind."""
        kinds = np.concatenate(self.words) & KIND_MASK
        messages = len(self.workload.messages) * self.workload.micro_batches
        return Trace(
            actions=spans_listed(self.spans[kinds < STEP]),
            messages=spans_listed(self.items[:messages]),
            buckets=spans_listed(self.items[messages:]),
            steps=spans_listed(self.spans[kinds == STEP]),
            iteration_s=self.end_s,
        )

    def ends_s(self, micro_batches: int, iterations: int) -> list[float]:
        """When the last action or step ends of each iteration of ``micro_batches``."""
        words, ends_s = np.concatenate(self.words), np.zeros(iterations)
        works = (words & KIND_MASK) <= STEP
        number = (words[works] >> MICRO_SHIFT) // micro_batches
        np.maximum.at(ends_s, number, self.spans[works, 1])
        return np.maximum.accumulate(ends_s).tolist()

    def busy_s(self) -> list[float]:
        """Seconds of compute of each device with work, in the order of their numbers."""
        spent_s = np.split(
            self.spans[:, 1] - self.spans[:, 0], np.cumsum(list(map(len, self.words)))
        )
        devices = (work.device for work in self.workload.devices)
        # One after another, as a timeline's events are added up: to the last digit the same.
        sums_s = (float(np.add.accumulate(own)[-1]) for own in spent_s[:-1])
        return [busy_s for _, busy_s in sorted(zip(devices, sums_s, strict=True))]


def played(workload: Workload) -> Played:
    """Play all iterations, as `play` does."""
    orders, each = orders_of(workload), workload.streams_each
    found = native.play(workload.parts.in_core, orders.in_core, workload.steps_together)
    words = [
        orders.words[orders.start[work.group * each] : orders.start[work.group * each + each]]
        for work in workload.devices
    ]
    return Played(workload, words, found.actions, found.items, found.end_s)


def orders_of(workload: Workload) -> FlatOrders:
    """The flat orders of a workload."""
    return flatten(
        workload.schedule,
        workload.instances,
        workload.micro_batches_per_iteration,
        iterations=workload.iterations,
    )


def spans_listed(rows: Spans) -> tuple[Span, ...]:
    pairs: list[list[float]] = rows.tolist()
    return tuple((start, end) for start, end in pairs)
