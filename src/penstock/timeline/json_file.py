"""Reads and writes timelines as JSON, with one compact list for each event."""

import json
from pathlib import Path
from typing import Annotated, TypeAlias, get_args

from pydantic import AfterValidator, ConfigDict, Field

from penstock.errors import BadInput
from penstock.files import (
    Entry,
    check_document,
    parse_json,
    read_text,
    write_text,
)
from penstock.timeline.timeline import Event, EventKind, MemorySample, Timeline

SCHEMA = "penstock-timeline-1"
EVENT_FIELDS = ["device", "kind", "stage", "micro_batch", "start_s", "end_s", "peer", "bytes"]
MEMORY_FIELDS = ["device", "time_s", "bytes"]
KINDS: tuple[EventKind, ...] = get_args(EventKind)

Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Device: TypeAlias = Annotated[int, Field(ge=0)]
EventRow: TypeAlias = Annotated[
    tuple[Device, EventKind, int, int, Number, Number, int, Number], Field(strict=False)
]
SampleRow: TypeAlias = Annotated[tuple[Device, Number, Number], Field(strict=False)]


def must_be(wanted: object) -> AfterValidator:
    """A check that a value is the one that this version writes."""

    def check(found: object) -> object:
        if found != wanted:
            raise ValueError(f"this version reads {wanted!r}; simulate or run the plan again")
        return found

    return AfterValidator(check)


class TimelineEntry(Entry):
    """The file of a timeline; other keys are of no account."""

    model_config = ConfigDict(extra="ignore")

    version: Annotated[str, must_be(SCHEMA)] = Field(alias="schema")
    title: str = ""
    devices: int
    event_fields: Annotated[list[str], must_be(EVENT_FIELDS)]
    events: list[EventRow]
    memory_fields: Annotated[list[str], must_be(MEMORY_FIELDS)]
    memory: list[SampleRow]


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
    """The timeline that `timeline_to_json` wrote; ``where`` names it in error messages."""
    entry = check_document(TimelineEntry, values, where)
    events = tuple(Event(*row) for row in entry.events)
    memory = tuple(MemorySample(*row) for row in entry.memory)
    for one in (*events, *memory):
        if one.device >= entry.devices:
            raise BadInput(
                f"{where}: device {one.device} is not below its number of devices, "
                f"{entry.devices}; simulate or run the plan again"
            )
    for event in events:
        if event.end_s < event.start_s:
            raise BadInput(
                f"{where}: an event ends at {event.end_s} s before its start {event.start_s} s; "
                f"simulate or run the plan again"
            )
    return Timeline(events, entry.devices, memory, entry.title)


def write_timeline_json(timeline: Timeline, path: Path | str) -> None:
    """Write ``timeline`` to ``path``.

    Raises:
        BadInput: the file cannot be written.
    """
    write_text(path, json.dumps(timeline_to_json(timeline)) + "\n")


def read_timeline(path: Path | str) -> Timeline:
    """Read the timeline at ``path``."""
    values = parse_json(read_text(path, "timeline"), path, "timeline")
    return timeline_from_json(values, f"timeline '{path}'")
