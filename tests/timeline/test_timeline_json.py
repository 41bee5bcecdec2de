"""Timelines survive the disk; everything else under their name is refused with the reason."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadInput
from penstock.timeline.json_file import (
    KINDS,
    read_timeline,
    timeline_from_json,
    timeline_to_json,
    write_timeline_json,
)
from penstock.timeline.timeline import Event, MemorySample, Timeline

SECONDS = st.floats(0, 1e6)
EVENTS = st.builds(
    lambda device, kind, stage, m, start_s, length_s, peer, size: Event(
        device, kind, stage, m, start_s, start_s + length_s, peer, size
    ),
    st.integers(0, 3),
    st.sampled_from(KINDS),
    st.integers(0, 9),
    st.integers(-1, 99),
    SECONDS,
    SECONDS,
    st.integers(-1, 3),
    st.floats(0, 1e12),
)
SAMPLES = st.builds(MemorySample, st.integers(0, 3), SECONDS, st.floats(0, 1e12))
TIMELINES = st.builds(
    Timeline,
    st.lists(EVENTS, max_size=5).map(tuple),
    st.just(4),
    st.lists(SAMPLES, max_size=5).map(tuple),
    st.text(max_size=9),
)


@given(TIMELINES)
def test_a_timeline_is_read_back_as_written(timeline: Timeline) -> None:
    assert timeline_from_json(json.loads(json.dumps(timeline_to_json(timeline)))) == timeline


def test_a_file_is_read_back_as_written(tmp_path: Path) -> None:
    timeline = Timeline((Event(0, "F", 0, 0, 0.0, 1.0),), 1, (MemorySample(0, 0.0, 1.0),), "a run")
    write_timeline_json(timeline, tmp_path / "t.json")
    assert read_timeline(tmp_path / "t.json") == timeline


def spoilt(**changes: object) -> str:
    """A timeline file with some entries replaced."""
    timeline = Timeline((Event(0, "F", 0, 0, 0.0, 1.0),), 1)
    return json.dumps({**timeline_to_json(timeline), **changes})


REFUSED = {
    "not JSON": ("{", "not valid JSON"),
    "not an object": ("[]", "must be a table"),
    "another schema": (
        spoilt(schema="penstock-timeline-0"),
        "schema is 'penstock-timeline-0'; this version reads 'penstock-timeline-1'",
    ),
    "other columns": (spoilt(event_fields=["device"]), "event_fields"),
    "an unknown kind": (
        spoilt(events=[[0, "Z", 0, 0, 0, 1, -1, 0]]),
        r"events\[0\]\[1\] is 'Z'; input should be 'F', 'B'",
    ),
    "a short row": (spoilt(events=[[0, "F"]]), "is missing"),
    "a device too many": (spoilt(events=[[1, "F", 0, 0, 0, 1, -1, 0]]), "device 1"),
    "an end before its start": (spoilt(events=[[0, "F", 0, 0, 2, 1, -1, 0]]), "before its start"),
    "a time that is none": (spoilt(memory=[[0, "now", 1]]), r"memory\[0\]\[1\] is 'now'; .*number"),
    "rows that are none": (spoilt(events=3), "list"),
}


@pytest.mark.parametrize("text, reason", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_timeline_is_refused_with_the_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=reason) as refused:
        read_timeline(path)
    assert str(path) in str(refused.value)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere"):
        read_timeline(tmp_path / "nowhere.json")
    with pytest.raises(BadInput, match="nowhere"):
        write_timeline_json(Timeline((), 1), tmp_path / "nowhere" / "t.json")
