"""Write timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Source: "Trace Event Format", Google (complete events ``X``, flows ``s`` and ``f``, counters ``C``,
metadata ``M``); times are microseconds.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from penstock.files import Json, write_text
from penstock.timeline.metrics import COMPUTE
from penstock.timeline.timeline import Event, Timeline

ENGINES = ("compute", "send", "receive")


def write_trace(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write ``timelines``, each as a process of its own, to a trace file."""
    events = [
        event
        for process, timeline in enumerate(timelines)
        for event in trace_events(timeline, process)
    ]
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    write_text(path, json.dumps(document) + "\n")


def trace_events(timeline: Timeline, process: int) -> list[dict[str, Json]]:
    """The trace events of one timeline: names, slices, message arrows, memory counters.

    A device has one thread for compute, one for sending and reducing, and one for receiving. There
    are more if events of one of these overlap, since slices of a thread must not.
    """
    lanes = lanes_of(timeline)
    numbers = {lane: number for number, lane in enumerate(sorted(set(lanes)), start=1)}
    threads = [numbers[lane] for lane in lanes]
    stages: dict[int, set[int]] = defaultdict(set)
    for event in timeline.events:
        if event.kind in COMPUTE and event.micro_batch >= 0:
            stages[event.device].add(event.stage)
    slices = [
        slice_of(event, process, thread, with_stage=len(stages[event.device]) > 1)
        for event, thread in zip(timeline.events, threads, strict=True)
    ]
    names = [metadata("process_name", process, 0, name=timeline.title or f"timeline {process}")]
    for (device, engine, lane), thread in numbers.items():
        name = f"device {device} {ENGINES[engine]}" + (f" {lane + 1}" if lane else "")
        names.append(metadata("thread_name", process, thread, name=name))
        names.append(metadata("thread_sort_index", process, thread, sort_index=thread))
    return [
        *names,
        *slices,
        *message_arrows(timeline, process, threads),
        *memory(timeline, process),
    ]


def lanes_of(timeline: Timeline) -> list[tuple[int, int, int]]:
    """Device, engine and lane of each event: the first lane that is free when it starts."""
    found = [(0, 0, 0)] * len(timeline.events)
    free_from_s: dict[tuple[int, int], list[float]] = defaultdict(list)
    for index in sorted(range(len(found)), key=lambda i: timeline.events[i].start_s):
        event = timeline.events[index]
        engine = 0 if event.kind in COMPUTE else 2 if event.kind == "RECV" else 1
        lanes = free_from_s[event.device, engine]
        slack_s = 1e-9 * max(event.end_s, 1e-9)
        free = (i for i, end_s in enumerate(lanes) if end_s <= event.start_s + slack_s)
        lane = next(free, len(lanes))
        lanes[lane : lane + 1] = [event.end_s]
        found[index] = (event.device, engine, lane)
    return found


def metadata(kind: str, process: int, thread: int, **values: Json) -> dict[str, Json]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": values}


def slice_of(event: Event, process: int, thread: int, with_stage: bool) -> dict[str, Json]:
    """An event as a complete slice, named like an action, with its stage if needed."""
    number = str(event.micro_batch) if event.micro_batch >= 0 else ""
    stage = str(event.stage) if with_stage and number else ""
    about: dict[str, Json] = {"stage": event.stage, "micro_batch": event.micro_batch}
    if event.peer >= 0:
        about["peer"] = event.peer
    if event.bytes > 0:
        about["bytes"] = event.bytes
    return {
        "ph": "X",
        "name": f"{stage}{event.kind}{number}",
        "cat": event.kind,
        "pid": process,
        "tid": thread,
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "args": about,
    }


def message_arrows(
    timeline: Timeline, process: int, threads: Sequence[int]
) -> list[dict[str, Json]]:
    """A flow from each send to its receive.

    A receive is matched with the first unmatched send between the same devices for the same
    micro-batch; sends of a neighbouring stage are preferred.
    """
    sent: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for index, event in enumerate(timeline.events):
        if event.kind == "SEND":
            sent[event.device, event.peer, event.micro_batch].append(index)
    arrows: list[dict[str, Json]] = []
    for index, event in enumerate(timeline.events):
        waiting = sent[event.peer, event.device, event.micro_batch]
        if event.kind != "RECV" or not waiting:
            continue
        near = [i for i in waiting if abs(timeline.events[i].stage - event.stage) == 1]
        sender = (near or waiting)[0]
        waiting.remove(sender)
        common = {"name": "message", "cat": "message", "id": f"{process}.{len(arrows) // 2}"}
        begin_s = timeline.events[sender].start_s
        for thread, time_s, kind in (
            (threads[sender], begin_s, {"ph": "s"}),
            (threads[index], event.end_s, {"ph": "f", "bp": "e"}),
        ):
            arrows.append({**common, **kind, "pid": process, "tid": thread, "ts": time_s * 1e6})
    return arrows


def memory(timeline: Timeline, process: int) -> list[dict[str, Json]]:
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
