"""Timelines with messages, reductions and steps, made from schedules without a simulator."""

from dataclasses import replace

from scripts import script_at

from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.timeline.timeline import Event, EventKind, Timeline

GALLERY = script_at("docs/pictures/schedules.py", "schedules")
schedule_timeline = GALLERY.schedule_timeline

MESSAGE_S, MESSAGE_BYTES = 0.25, 4e6


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
