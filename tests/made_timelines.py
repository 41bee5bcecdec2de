"""Timelines with messages, reductions and steps, made from schedules without a simulator."""

from dataclasses import replace

from scripts import script_at

from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.timeline.timeline import Event, EventKind, MemorySample, Timeline

GALLERY = script_at("docs/pictures/schedules.py", "schedules")
schedule_timeline = GALLERY.schedule_timeline

MESSAGE_S, MESSAGE_BYTES = 0.25, 4e6

#         0    1    2    3    4    5    6    7
# dev 0   F    s              r    B    reduce
# dev 2        r    F    B    s    -    STEP
TWO_STAGES = Timeline(
    events=(
        Event(0, "F", 0, 0, 0.0, 1.0),
        Event(0, "SEND", 0, 0, 1.0, 2.0, peer=2, bytes=8.0),
        Event(2, "RECV", 1, 0, 1.0, 2.0, peer=0, bytes=8.0),
        Event(2, "F", 1, 0, 2.0, 3.0),
        Event(2, "B", 1, 0, 3.0, 4.0),
        Event(2, "SEND", 1, 0, 4.0, 5.0, peer=0, bytes=8.0),
        Event(0, "RECV", 0, 0, 4.0, 5.0, peer=2, bytes=8.0),
        Event(0, "B", 0, 0, 5.0, 6.0),
        Event(0, "REDUCE", 0, -1, 6.0, 7.5),
        Event(2, "STEP", 1, -1, 6.0, 7.0),
    ),
    devices=3,
    memory=(MemorySample(0, 0.0, 5.0), MemorySample(0, 1.0, 9.0), MemorySample(0, 2.0, 4.0)),
)


def timeline_with_messages(schedule: Schedule, shape: PipelineShape, title: str = "") -> Timeline:
    """``schedule`` played on ``shape``; outputs and gradients are sent when they are there.

    Afterwards each device reduces its gradients for a second and steps for half of one.
    """
    played = schedule_timeline(schedule, shape, title)
    events = list(played.events)
    for event in played.events:
        events += message(event, shape)
    for device in range(played.devices):
        last_s = max(e.end_s for e in played.events if e.device == device)
        events.append(Event(device, "REDUCE", 0, -1, last_s, last_s + 1.0, bytes=1e8))
        events.append(Event(device, "STEP", 0, -1, last_s + 1.0, last_s + 1.5))
    events.sort(key=lambda event: (event.start_s, event.device, event.end_s))
    return replace(played, events=tuple(events))


def message(event: Event, shape: PipelineShape) -> list[Event]:
    """The message that follows an event, seen from both ends; none within a device."""
    step = {"F": 1, "B": -1, "I": -1}.get(event.kind, 0)
    to = event.stage + step
    if not step or not 0 <= to < shape.stages:
        return []
    receiver = shape.group_of(to, event.micro_batch)
    if receiver == event.device:
        return []
    span = (event.end_s, event.end_s + MESSAGE_S)
    ends: list[tuple[int, EventKind, int, int]] = [
        (event.device, "SEND", event.stage, receiver),
        (receiver, "RECV", to, event.device),
    ]
    return [
        Event(here, kind, stage, event.micro_batch, *span, there, MESSAGE_BYTES)
        for here, kind, stage, there in ends
    ]
