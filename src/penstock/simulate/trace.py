"""When everything of a workload started and ended, and the timeline made of it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from penstock.simulate.workload import DeviceWork, Workload
from penstock.timeline.timeline import Event, EventKind, MemorySample, Timeline

__all__ = ["Engine", "Span", "Trace", "first_actions", "timeline_of"]

Span: TypeAlias = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one played workload.

    ``actions`` are those of the first device in order, then of the second, and so on;
    ``messages[i * micro_batches + m]`` is message ``i`` of micro-batch ``m``; ``buckets`` and
    ``steps`` (one a device) are numbered as in the workload.
    """

    actions: tuple[Span, ...]
    messages: tuple[Span, ...]
    buckets: tuple[Span, ...]
    steps: tuple[Span, ...]
    iteration_s: float


Engine: TypeAlias = Callable[[Workload], Trace]
"""Plays a workload. `plain.play` and `compiled.play` agree to rounding."""


def first_actions(workload: Workload) -> tuple[int, ...]:
    """For each device position the index of its first action in `Trace.actions`."""
    counts = (len(workload.schedule.of(work.stage)) for work in workload.devices)
    return tuple(accumulate(counts, initial=0))[:-1]


def timeline_of(
    workload: Workload,
    trace: Trace,
    devices: int,
    memory: tuple[MemorySample, ...] = (),
    title: str = "",
) -> Timeline:
    """The trace as events on the devices of the cluster, sorted by start.

    Messages, reductions and steps that take no time leave no event.
    """
    events = [
        *compute_events(workload, trace),
        *message_events(workload, trace),
        *reduction_events(workload, trace),
    ]
    events.sort(key=lambda event: (event.start_s, event.device, event.end_s))
    return Timeline(tuple(events), devices, memory, title)


def compute_events(workload: Workload, trace: Trace) -> list[Event]:
    """Actions and optimizer steps."""
    events: list[Event] = []
    for position, first in enumerate(first_actions(workload)):
        work = workload.devices[position]
        for index, action in enumerate(workload.schedule.of(work.stage)):
            span = trace.actions[first + index]
            events.append(Event(work.device, action.kind, work.stage, action.micro_batch, *span))
        step = trace.steps[position]
        if step[1] > step[0]:
            events.append(Event(work.device, "STEP", work.stage, -1, *step))
    return events


def message_events(workload: Workload, trace: Trace) -> list[Event]:
    """Every message twice: on its sender and on its receiver."""
    events: list[Event] = []
    for index, message in enumerate(workload.messages):
        if message.seconds > 0:
            sender = workload.devices[message.sender]
            receiver = workload.devices[message.receiver]
            ends: tuple[tuple[DeviceWork, EventKind, DeviceWork], ...] = (
                (sender, "SEND", receiver),
                (receiver, "RECV", sender),
            )
            for m in range(workload.micro_batches):
                span = trace.messages[index * workload.micro_batches + m]
                for here, kind, there in ends:
                    events.append(
                        Event(here.device, kind, here.stage, m, *span, there.device, message.bytes)
                    )
    return events


def reduction_events(workload: Workload, trace: Trace) -> list[Event]:
    """Every bucket once on each device that reduces it, with the device's own stage."""
    events: list[Event] = []
    spans = iter(trace.buckets)
    for reduction in workload.reductions:
        for bucket in reduction.buckets:
            span = next(spans)
            if span[1] > span[0]:
                for position in reduction.members:
                    work = workload.devices[position]
                    events.append(
                        Event(work.device, "REDUCE", work.stage, -1, *span, bytes=bucket.bytes)
                    )
    return events
