import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from made_timelines import timeline_with_messages

from penstock.errors import BadInput
from penstock.report.timeline_files import FORMATS, check_timeline_path, write_timeline
from penstock.schedule.families.early_backward import gpipe
from penstock.schedule.shape import PipelineShape

SHAPE = PipelineShape(stages=2, micro_batches=2)
TIMELINE = timeline_with_messages(gpipe(SHAPE), SHAPE, "two stages")


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_ending_decides_what_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"timeline{suffix.upper()}"
    write_timeline(path, TIMELINE, "two-devices", [10.0, 10.0])
    content = path.read_bytes()
    match suffix:
        case ".json":
            slices = [e for e in json.loads(content)["traceEvents"] if e["ph"] == "X"]
            assert len(slices) == len(TIMELINE.events)
        case ".svg":
            assert ET.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
        case ".pdf" | ".png":
            assert content.startswith({".pdf": b"%PDF", ".png": b"\x89PNG"}[suffix])
        case ".html":
            assert content.startswith(b"<!doctype html>")
        case _:
            assert content.startswith(b"two stages: 2 devices of two-devices, ")
            assert b"\x1b" not in content
    if suffix in (".svg", ".html", ".txt"):
        assert b"2 devices of two-devices, 10.5 s, bubble" in content
    assert list(tmp_path.iterdir()) == [path]


def test_another_title_stands_over_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    write_timeline(path, TIMELINE, title="gpipe on two devices")
    assert "gpipe on two devices" in path.read_text() and "two stages" not in path.read_text()


@pytest.mark.parametrize("name", ["timeline.gif", "timeline", "timeline.svg.gz"])
def test_other_endings_are_refused_with_those_that_exist(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput) as refused:
        write_timeline(tmp_path / name, TIMELINE)
    assert name in str(refused.value)
    assert all(suffix in str(refused.value) for suffix in FORMATS)
    with pytest.raises(BadInput):
        check_timeline_path(name)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_place_that_does_not_exist_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "nowhere" / f"timeline{suffix}"
    with pytest.raises(BadInput, match="cannot write"):
        write_timeline(path, TIMELINE)


def test_without_matplotlib_pictures_are_refused_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInput, match=r"pip install 'penstock\[plot\]'"):
        check_timeline_path("timeline.pdf")
    write_timeline(tmp_path / "timeline.html", TIMELINE)
