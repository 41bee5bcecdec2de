"""Timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Source: "Trace Event Format", Google (complete events ``X``, flows ``s`` and ``f``, counters ``C``,
metadata ``M``); times are microseconds.
"""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

from penstock.document import Json, write_text
from penstock.timeline.metrics import COMPUTE
from penstock.timeline.timeline import Event, Timeline

__all__ = ["trace_events", "write_trace"]

LANES = ("compute", "send", "receive")


def write_trace(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write ``timelines``, each as a process of its own, to a trace file.

    Raises:
        BadInput: the file cannot be written.
    """
    events = [
        event
        for process, timeline in enumerate(timelines)
        for event in trace_events(timeline, process)
    ]
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    write_text(path, json.dumps(document) + "\n")


def trace_events(timeline: Timeline, process: int) -> list[dict[str, Json]]:
    """The trace events of one timeline: names, slices, message arrows, memory counters."""
    names = process_names(timeline, process)
    slices = [slice_of(event, process) for event in timeline.events]
    return [*names, *slices, *message_arrows(timeline, process), *memory(timeline, process)]


def process_names(timeline: Timeline, process: int) -> list[dict[str, Json]]:
    """The process named after the timeline, and a thread for each lane of a device in use."""
    title = timeline.title or f"timeline {process}"
    named: list[dict[str, Json]] = [metadata("process_name", process, 0, name=title)]
    for device, lane in sorted({(event.device, lane_of(event)) for event in timeline.events}):
        thread = thread_of(device, lane)
        name = f"device {device} {LANES[lane]}"
        named.append(metadata("thread_name", process, thread, name=name))
        named.append(metadata("thread_sort_index", process, thread, sort_index=thread))
    return named


def metadata(kind: str, process: int, thread: int, **values: Json) -> dict[str, Json]:
    """A metadata event."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": values}


def lane_of(event: Event) -> int:
    """The engine of its device that an event occupies, as an index of `LANES`."""
    if event.kind in COMPUTE:
        return 0
    return 2 if event.kind == "RECV" else 1


def thread_of(device: int, lane: int) -> int:
    """The thread number of a lane; 0 is left to the process."""
    return device * len(LANES) + lane + 1


def slice_of(event: Event, process: int) -> dict[str, Json]:
    """An event as a complete slice."""
    number = str(event.micro_batch) if event.micro_batch >= 0 else ""
    about: dict[str, Json] = {"stage": event.stage, "micro_batch": event.micro_batch}
    if event.peer >= 0:
        about |= {"peer": event.peer, "bytes": event.bytes}
    return {
        "ph": "X",
        "name": f"{event.kind}{number}",
        "cat": event.kind,
        "pid": process,
        "tid": thread_of(event.device, lane_of(event)),
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "args": about,
    }


def message_arrows(timeline: Timeline, process: int) -> list[dict[str, Json]]:
    """A flow from each send to its receive: the n-th of a pair and micro-batch to the n-th."""
    sent: dict[tuple[int, int, int], deque[Event]] = defaultdict(deque)
    for event in timeline.events:
        if event.kind == "SEND":
            sent[event.device, event.peer, event.micro_batch].append(event)
    arrows: list[dict[str, Json]] = []
    for event in timeline.events:
        waiting = sent[event.peer, event.device, event.micro_batch]
        if event.kind != "RECV" or not waiting:
            continue
        sender, number = waiting.popleft(), len(arrows) // 2
        common: dict[str, Json] = {
            "name": "message",
            "cat": "message",
            "id": f"{process}.{number}",
            "pid": process,
        }
        arrows.append(common | {"ph": "s"} | place(sender, sender.start_s))
        arrows.append(common | {"ph": "f", "bp": "e"} | place(event, event.end_s))
    return arrows


def place(event: Event, time_s: float) -> dict[str, Json]:
    """The thread of an event and a time on it."""
    return {"tid": thread_of(event.device, lane_of(event)), "ts": time_s * 1e6}


def memory(timeline: Timeline, process: int) -> list[dict[str, Json]]:
    """A counter track for each device's memory."""
    return [
        {
            "ph": "C",
            "name": f"memory of device {sample.device}",
            "pid": process,
            "ts": sample.time_s * 1e6,
            "args": {"bytes": sample.bytes},
        }
        for sample in timeline.memory
    ]
