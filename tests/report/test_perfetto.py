import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

from penstock.report.page import write_report
from penstock.report.perfetto import trace_events
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


def test_slices_of_a_thread_do_not_overlap_and_threads_are_named(run_directory: Path) -> None:
    events = trace_events(read_timeline(run_directory / "predicted.json"), process=0)
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["tid"] for e in slices} == named
    for thread in named:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == thread)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))


def test_every_message_has_an_arrow_from_its_send_to_its_receive(run_directory: Path) -> None:
    timeline = read_timeline(run_directory / "predicted.json")
    events = trace_events(timeline, process=0)
    receives = sum(e.kind == "RECV" for e in timeline.events)
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert len(starts) == len(ends) == receives > 0
    assert all(starts[number] <= ends[number] for number in ends)


def test_times_are_in_microseconds() -> None:
    timeline = Timeline((Event(0, "F", 0, 3, 0.001, 0.003),), devices=1, title="one")
    (only,) = (e for e in trace_events(timeline, process=0) if e["ph"] == "X")
    assert (only["name"], only["ts"], only["dur"]) == ("F3", 1000.0, 2000.0)
