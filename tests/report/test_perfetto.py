import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_timelines import timeline_with_messages

from penstock.report.page import write_report
from penstock.report.perfetto import trace_events
from penstock.schedule.families.early_backward import gpipe
from penstock.schedule.schedule import Schedule, parse_schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import validate
from penstock.timeline.json_file import read_timeline
from penstock.timeline.timeline import Event, Timeline


def test_predicted_and_measured_are_two_processes_with_all_their_events(
    run_directory: Path,
) -> None:
    write_report(run_directory)
    trace = json.loads((run_directory / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["name"] == "process_name"]
    assert names == ["predicted", "measured"]
    slices = Counter(e["pid"] for e in trace if e["ph"] == "X")
    for process, name in enumerate(names):
        assert slices[process] == len(read_timeline(run_directory / f"{name}.json").events)


def test_times_are_in_microseconds() -> None:
    timeline = Timeline((Event(0, "F", 0, 3, 0.001, 0.003),), devices=1, title="one")
    (only,) = (e for e in trace_events(timeline, process=0) if e["ph"] == "X")
    assert (only["name"], only["ts"], only["dur"]) == ("F3", 1000.0, 2000.0)


def threads_are_named_and_never_overlap(events: list[dict[str, Any]]) -> bool:
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return spans.keys() == named and all(
        end <= start + 1e-3
        for own in spans.values()
        for (_, end), (start, _) in pairwise(sorted(own))
    )


LOOPED = PipelineShape(stages=4, micro_batches=2, placement=(0, 1, 0, 1))
LOOPED_PICTURE = (
    "stage 0,2 0F0 0F1 2F0 2F1 2I0 2W0 2I1 0I0 2W1 0W0 0I1 0W1\n"
    "stage 1,3 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1"
)
MIRRORED = PipelineShape(stages=2, micro_batches=2, mirrored=True)
MIRRORED_PICTURE = "stage 0,1 0F0 1F1 1B1 0B0\nstage 0,1 0F1 1F0 1B0 0B1"


@pytest.mark.parametrize(
    ("shape", "picture"), [(LOOPED, LOOPED_PICTURE), (MIRRORED, MIRRORED_PICTURE)]
)
def test_several_stages_a_device_are_named_and_their_messages_find_one_another(
    shape: PipelineShape, picture: str
) -> None:
    schedule = parse_schedule(picture)
    validate(schedule, shape)
    timeline = timeline_with_messages(schedule, shape)
    events: list[dict[str, Any]] = trace_events(timeline, process=0)  # type: ignore[assignment]
    assert threads_are_named_and_never_overlap(events)
    names = {e["name"] for e in events if e["ph"] == "X" and e["cat"] in "FBIW"}
    assert names == {str(action) for order in schedule.orders for action in order}
    sends = {(e["tid"], e["ts"]): e for e in events if e["ph"] == "X" and e["cat"] == "SEND"}
    receives = {
        (e["tid"], round(e["ts"] + e["dur"], 3)): e
        for e in events
        if e["ph"] == "X" and e["cat"] == "RECV"
    }
    starts = {e["id"]: sends[e["tid"], e["ts"]] for e in events if e["ph"] == "s"}
    ends = {e["id"]: receives[e["tid"], round(e["ts"], 3)] for e in events if e["ph"] == "f"}
    assert len(starts) == len(ends) == len(receives) == len(sends) > 0
    for number, sent in starts.items():
        received = ends[number]
        assert abs(sent["args"]["stage"] - received["args"]["stage"]) == 1
        assert sent["args"]["micro_batch"] == received["args"]["micro_batch"]
        assert sent["ts"] == received["ts"]


def test_events_that_overlap_on_an_engine_have_threads_of_their_own() -> None:
    shape = PipelineShape(stages=2, micro_batches=4)
    schedule = Schedule(gpipe(shape).orders, concurrent=True)
    events: list[dict[str, Any]] = trace_events(timeline_with_messages(schedule, shape), 0)  # type: ignore[assignment]
    assert threads_are_named_and_never_overlap(events)
    named = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"device 1 compute", "device 1 compute 2", "device 0 send", "device 1 receive"} <= named


def test_memory_is_a_counter_of_each_device() -> None:
    shape = PipelineShape(stages=2, micro_batches=2)
    timeline = timeline_with_messages(gpipe(shape), shape)
    counters = [e for e in trace_events(timeline, 7) if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"memory of device 0", "memory of device 1"}
    assert len(counters) == len(timeline.memory)
    for counter, sample in zip(counters, timeline.memory, strict=True):
        assert (counter["ts"], counter["args"]) == (sample.time_s * 1e6, {"bytes": sample.bytes})
        assert counter["pid"] == 7


def test_a_message_that_overtakes_another_still_finds_its_receiver() -> None:
    events = (
        Event(0, "SEND", 0, 0, 0.0, 0.5, peer=1),
        Event(1, "RECV", 3, 0, 0.0, 0.3, peer=0),
        Event(1, "RECV", 1, 0, 0.05, 0.5, peer=0),
        Event(0, "SEND", 2, 0, 0.1, 0.3, peer=1),
    )
    trace = trace_events(Timeline(events, 2), 0)
    starts = {e["id"]: e["ts"] for e in trace if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in trace if e["ph"] == "f"}
    assert {(starts[i], ends[i]) for i in starts} == {(0.0, 0.5e6), (0.1e6, 0.3e6)}
