"""Reads and writes timelines as JSON, with one compact list for each event."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

from penstock.document import parse_json, read_text, write_text
from penstock.errors import BadInput
from penstock.timeline.timeline import Event, EventKind, MemorySample, Timeline

__all__ = ["read_timeline", "timeline_from_json", "timeline_to_json", "write_timeline"]

SCHEMA = "penstock-timeline-1"
EVENT_FIELDS = ["device", "kind", "stage", "micro_batch", "start_s", "end_s", "peer", "bytes"]
MEMORY_FIELDS = ["device", "time_s", "bytes"]
KINDS: dict[str, EventKind] = {kind: kind for kind in get_args(EventKind)}


def timeline_to_json(timeline: Timeline) -> dict[str, object]:
    """The timeline as JSON values: events and memory samples are rows under named columns."""
    return {
        "schema": SCHEMA,
        "title": timeline.title,
        "devices": timeline.devices,
        "event_fields": EVENT_FIELDS,
        "events": [
            [e.device, e.kind, e.stage, e.micro_batch, e.start_s, e.end_s, e.peer, e.bytes]
            for e in timeline.events
        ],
        "memory_fields": MEMORY_FIELDS,
        "memory": [[s.device, s.time_s, s.bytes] for s in timeline.memory],
    }


def timeline_from_json(values: object, where: str = "timeline") -> Timeline:
    """The timeline that `timeline_to_json` wrote; ``where`` names it in error messages.

    Raises:
        BadInput: another schema, a missing column, or a row that is not an event.
    """
    if not isinstance(values, dict):
        raise BadInput(f"{where} is not a JSON object; write it with 'penstock simulate' or a run")
    fields = cast("Mapping[str, object]", values)
    if fields.get("schema") != SCHEMA:
        raise BadInput(
            f"{where} has schema {fields.get('schema')!r}, this version reads '{SCHEMA}'; "
            f"simulate or run the plan again"
        )
    if fields.get("event_fields") != EVENT_FIELDS or fields.get("memory_fields") != MEMORY_FIELDS:
        raise BadInput(
            f"{where}: event_fields must be {EVENT_FIELDS} and memory_fields {MEMORY_FIELDS}; "
            f"simulate or run the plan again"
        )
    try:
        devices = whole(fields["devices"])
        events = tuple(event_from_row(row, devices) for row in rows(fields["events"]))
        memory = tuple(sample_from_row(row, devices) for row in rows(fields["memory"]))
    except (KeyError, TypeError, ValueError, IndexError) as cause:
        raise BadInput(
            f"{where} has a missing or malformed entry ({cause}); simulate or run the plan again"
        ) from cause
    return Timeline(events, devices, memory, str(fields.get("title", "")))


def rows(values: object) -> list[list[object]]:
    """``values`` as a list of rows."""
    if not isinstance(values, list):
        raise TypeError("rows must be a list")
    return cast("list[list[object]]", values)


def whole(value: object) -> int:
    """``value`` as an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def real(value: object) -> float:
    """``value`` as a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number")
    if not abs(value) < float("inf"):
        raise ValueError(f"{value!r} is not finite")
    return float(value)


def device_of(value: object, devices: int) -> int:
    """``value`` as the index of one of ``devices`` devices."""
    device = whole(value)
    if not 0 <= device < devices:
        raise ValueError(f"device {device} is not below {devices}")
    return device


def event_from_row(row: list[object], devices: int) -> Event:
    """The event of a row; its kind must be known, and it must not end before it starts."""
    device, kind_text, stage, micro_batch, start_s, end_s, peer, size_bytes = row
    kind = KINDS.get(str(kind_text))
    if kind is None:
        raise ValueError(f"{kind_text!r} is none of {', '.join(KINDS)}")
    event = Event(
        device_of(device, devices),
        kind,
        whole(stage),
        whole(micro_batch),
        real(start_s),
        real(end_s),
        whole(peer),
        real(size_bytes),
    )
    if event.end_s < event.start_s:
        raise ValueError(f"an event ends at {event.end_s} s before its start {event.start_s} s")
    return event


def sample_from_row(row: list[object], devices: int) -> MemorySample:
    """The memory sample of a row."""
    device, time_s, size_bytes = row
    return MemorySample(device_of(device, devices), real(time_s), real(size_bytes))


def write_timeline(timeline: Timeline, path: Path | str) -> None:
    """Write ``timeline`` to ``path``.

    Raises:
        BadInput: the file cannot be written.
    """
    write_text(path, json.dumps(timeline_to_json(timeline)) + "\n")


def read_timeline(path: Path | str) -> Timeline:
    """Read the timeline at ``path``.

    Raises:
        BadInput: no such file, not JSON, or not a timeline of this schema.
    """
    values = parse_json(read_text(path, "timeline"), path, "timeline")
    return timeline_from_json(values, f"timeline '{path}'")
