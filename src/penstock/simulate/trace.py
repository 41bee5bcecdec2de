"""Start and end of everything of a workload, and the timeline made from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from penstock.schedule.action import Action
from penstock.simulate.workload import DeviceWork, Workload
from penstock.timeline.timeline import Event, EventKind, MemorySample, Timeline

Span: TypeAlias = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one played workload, for all its iterations.

    ``actions`` are in order within a compute stream, stream after stream.
    ``messages[i * micro_batches + m]`` is message ``i`` of micro-batch ``m``; it is (0, 0) if the
    micro-batch passes another instance of the stage. ``buckets`` are those of one reduction, round
    after round, then of the next reduction. ``steps`` are in order within a device, device after
    device.
    """

    actions: tuple[Span, ...]
    messages: tuple[Span, ...]
    buckets: tuple[Span, ...]
    steps: tuple[Span, ...]
    iteration_s: float


def played_actions(workload: Workload, work: DeviceWork) -> tuple[list[Action], ...]:
    """The actions of each compute stream of a device; micro-batches are numbered throughout."""
    order = list(workload.schedule.of(work.group))
    streams = [order]
    if workload.streams_each > 1:
        streams = [
            [action for action in order if action.kind == "F"],
            [action for action in order if action.kind != "F"],
        ]
    return tuple(
        [
            Action(
                action.kind,
                action.stage,
                action.micro_batch + iteration * workload.micro_batches_per_iteration,
            )
            for iteration in range(workload.iterations)
            for action in stream
        ]
        for stream in streams
    )


def spans_of_actions(
    workload: Workload, trace: Trace
) -> Iterator[tuple[DeviceWork, tuple[tuple[list[Action], tuple[Span, ...]], ...]]]:
    """The actions and spans of each compute stream, by device."""
    first = 0
    for work in workload.devices:
        streams: list[tuple[list[Action], tuple[Span, ...]]] = []
        for actions in played_actions(workload, work):
            streams.append((actions, trace.actions[first : first + len(actions)]))
            first += len(actions)
        yield work, tuple(streams)


def timeline_of(
    workload: Workload,
    trace: Trace,
    devices: int,
    memory: tuple[MemorySample, ...] = (),
    title: str = "",
) -> Timeline:
    """The trace as events on the devices of the cluster, sorted by start.

    Messages, reductions and steps that take no time have no event.
    """
    events = [
        *compute_events(workload, trace),
        *message_events(workload, trace),
        *reduction_events(workload, trace),
    ]
    events.sort(key=lambda event: (event.start_s, event.device, event.end_s))
    return Timeline(tuple(events), devices, memory, title)


def compute_events(workload: Workload, trace: Trace) -> list[Event]:
    """The events of actions and optimizer steps."""
    events: list[Event] = []
    steps = iter(trace.steps)
    for work, streams in spans_of_actions(workload, trace):
        for actions, spans in streams:
            for action, span in zip(actions, spans, strict=True):
                events.append(
                    Event(work.device, action.kind, action.stage, action.micro_batch, *span)
                )
        for _ in range(workload.instances.steps_of(work.group) * workload.iterations):
            step = next(steps)
            if step[1] > step[0]:
                events.append(Event(work.device, "STEP", work.stage, -1, *step))
    return events


def message_events(workload: Workload, trace: Trace) -> list[Event]:
    """Two events for every message: one on its sender, one on its receiver."""
    events: list[Event] = []
    for index, message in enumerate(workload.messages):
        if message.seconds > 0:
            sender, receiver = (
                workload.replicas[message.sender],
                workload.replicas[message.receiver],
            )
            source, target = (workload.devices[end.position].device for end in (sender, receiver))
            ends: tuple[tuple[int, EventKind, int, int], ...] = (
                (source, "SEND", sender.stage, target),
                (target, "RECV", receiver.stage, source),
            )
            for m in range(workload.micro_batches):
                span = trace.messages[index * workload.micro_batches + m]
                if span[1] > span[0]:
                    events += [
                        Event(here, kind, stage, m, *span, there, message.bytes)
                        for here, kind, stage, there in ends
                    ]
    return events


def reduction_events(workload: Workload, trace: Trace) -> list[Event]:
    """One event for every bucket on each device that reduces it, with the device's own stage."""
    events: list[Event] = []
    spans = iter(trace.buckets)
    for reduction in workload.reductions:
        stages: dict[int, int] = {}
        for member in reduction.members:
            replica = workload.replicas[member]
            stages.setdefault(workload.devices[replica.position].device, replica.stage)
        for bucket in reduction.buckets * reduction.rounds:
            span = next(spans)
            if span[1] > span[0]:
                events += [
                    Event(device, "REDUCE", stage, -1, *span, bytes=bucket.bytes)
                    for device, stage in stages.items()
                ]
    return events
