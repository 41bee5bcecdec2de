"""`penstock simulate` with something changed, and what it draws."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands.refusals import Penstock, refused

from penstock.text import percent_text
from penstock.timeline.json_file import read_timeline, timeline_from_json


def test_the_answer_is_the_changed_plan_with_the_plan_as_it_is_beside_it(
    penstock: Penstock, run_directory: Path
) -> None:
    plan = run_directory / "plan.json"
    plain = penstock("simulate", plan, "--json").values
    assert not {"changes", "before"} & set(plain)
    values = penstock("simulate", plan, "--schedule", "gpipe", "--json").values
    assert values["changes"] == ["schedule gpipe"]
    before: Any = values["before"]
    assert before["iteration_s"] == plain["iteration_s"]
    assert max(before["peak_memory_bytes"]) < max(values["peak_memory_bytes"])
    assert before["explanation"]["words"] != values["explanation"]["words"]


def test_more_micro_batches_are_a_larger_batch(penstock: Penstock, run_directory: Path) -> None:
    values = penstock(
        "simulate", run_directory / "plan.json", "--micro-batches", 12, "--json"
    ).values
    assert values["micro_batches"] == 12 and values["before"]["micro_batches"] == 6
    assert values["micro_batch_size"] == values["before"]["micro_batch_size"]
    assert values["bubble"] < values["before"]["bubble"]


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("gpipe", 3), ("zb-h1", 3), ("pipedream", 3), ("interleaved", 6), ("hanayo", 6), ("zb-v", 6)],
)
def test_another_schedule_keeps_the_devices_and_cuts_anew_where_it_must(
    penstock: Penstock, run_directory: Path, schedule: str, stages: int
) -> None:
    options = ["--schedule", schedule, "--micro-batches", 8]
    values = penstock("simulate", run_directory / "plan.json", *options, "--json").values
    assert values["schedule"] == schedule and len(values["stages"]) == stages
    groups = [tuple(stage["devices"]) for stage in values["stages"]]
    assert list(dict.fromkeys(groups)) == [(0,), (1, 2), (3,)]
    again = {tuple(stage["devices"]) for stage in values["stages"] if stage["recompute"]}
    assert again == {(1, 2)}
    assert values["iteration_s"] > 0 and values["before"]["schedule"] == "1f1b"


def test_a_plan_with_several_stages_a_device_is_cut_anew_for_one(
    penstock: Penstock, run_directory: Path, tmp_path: Path
) -> None:
    plan = run_directory / "plan.json"
    document = json.loads(plan.read_text())
    document["stages"] = [
        {"layers": [2 * i, 2 * i + 2], "devices": [i % 2], "slices": [2], "recompute": False}
        for i in range(4)
    ]
    document["schedule"] = "interleaved"
    plan.write_text(json.dumps(document))
    kept = penstock("simulate", plan, "--schedule", "breadth-first", "--json").values
    assert [s["layers"] for s in kept["stages"]] == [s["layers"] for s in kept["before"]["stages"]]
    straight = penstock("simulate", plan, "--schedule", "1f1b", "--json").values
    assert [s["devices"] for s in straight["stages"]] == [[0], [1]]
    assert straight["stages"][-1]["layers"][1] == 8


def test_several_iterations_are_played_in_a_row(
    penstock: Penstock, run_directory: Path, tmp_path: Path
) -> None:
    plan, out = run_directory / "plan.json", tmp_path / "timeline.json"
    values = penstock("simulate", plan, "--iterations", 3, "-o", out, "--json").values
    one = penstock("simulate", plan, "--json").values
    assert not {"iterations", "steady_s"} & set(one)
    assert values["iterations"] == 3 and values["iteration_s"] == one["iteration_s"]
    assert 0 < values["steady_s"] <= values["iteration_s"] * (1 + 1e-9)
    end_s = max(event.end_s for event in read_timeline(out).events)
    assert end_s == pytest.approx(values["iteration_s"] + 2 * values["steady_s"])
    shown = penstock("simulate", plan, "--iterations", 3).output
    assert "3 iterations in a row" in shown and "for each after the first" in shown
    changed = penstock("simulate", plan, "--iterations", 2, "--micro-batches", 12, "--json").values
    assert changed["steady_s"] > changed["before"]["steady_s"]


def test_people_get_before_and_after_what_binds_and_a_chart(
    penstock: Penstock, run_directory: Path
) -> None:
    answer = penstock("simulate", run_directory / "plan.json", "--schedule", "gpipe")
    assert "with schedule gpipe" in answer.output
    values = penstock(
        "simulate", run_directory / "plan.json", "--schedule", "gpipe", "--json"
    ).values
    change = values["iteration_s"] / values["before"]["iteration_s"] - 1
    table = answer.output.partition("with schedule gpipe")[2].splitlines()
    row = next(line for line in table if line.split()[:1] == ["iteration"])
    assert row.rstrip().endswith(f"{'+' * (change > 0)}{percent_text(change)}")
    for words in ("iteration", "samples a second", "bubble", "peak memory", "device 3"):
        assert words in answer.output
    assert "Before: Bound by " in answer.output and "After: Bound by " in answer.output
    assert "F forward" in answer.output
    assert "Before: " not in penstock("simulate", run_directory / "plan.json").output


@pytest.mark.parametrize("ending", ["svg", "pdf", "png", "html", "json", "txt"])
def test_a_picture_is_drawn_by_its_ending(
    penstock: Penstock, run_directory: Path, tmp_path: Path, ending: str
) -> None:
    place = tmp_path / f"picture.{ending}"
    answer = penstock("simulate", run_directory / "plan.json", "--picture", place, "--json")
    assert answer.errors == f"wrote {place}\n"
    starts = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG", "html": b"<!", "json": b"{"}
    assert place.read_bytes().lstrip().startswith(starts.get(ending, b"1f1b: 6"))


def test_the_timeline_is_that_of_the_changed_plan(
    penstock: Penstock, run_directory: Path, tmp_path: Path
) -> None:
    options = ["--schedule", "gpipe", "--timeline", "--json"]
    values = penstock("simulate", run_directory / "plan.json", *options).values
    events = timeline_from_json(values["timeline"]).events
    assert max(event.end_s for event in events) == pytest.approx(values["iteration_s"])
    first = [e.kind for e in sorted(events, key=lambda e: e.start_s) if e.device == 0]
    assert [kind for kind in first if kind in "FB"] == ["F"] * 6 + ["B"] * 6


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--schedule", "gpip"], ["schedule 'gpip' is unknown", "did you mean 'gpipe'?"]),
        (["--micro-batches", "-1"], ["--micro-batches"]),
        (["--micro-batches", "two"], ["--micro-batches"]),
        (["--iterations", "0"], ["--iterations"]),
        (["--iterations", "100000"], ["--iterations"]),
        (["--picture", "p.gif"], ["'p.gif' ends in '.gif'", ".svg"]),
        (["--picture", "none/p.svg"], ["folder 'none' does not exist", "name another place"]),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_the_remedy(
    penstock: Penstock, run_directory: Path, options: list[str], told: list[str]
) -> None:
    refused(penstock("simulate", run_directory / "plan.json", *options), 2, *told)


def test_a_schedule_for_more_stages_than_layers_is_refused(
    penstock: Penstock, run_directory: Path
) -> None:
    plan = json.loads((run_directory / "plan.json").read_text())
    plan["stages"] = [
        {"layers": [i, i + 1], "devices": [i], "slices": [2], "recompute": False} for i in range(8)
    ]
    (run_directory / "plan.json").write_text(json.dumps(plan))
    cluster = run_directory / "cluster.toml"
    cluster.write_text(cluster.read_text().replace("count = 4", "count = 8"))
    answer = penstock("simulate", run_directory / "plan.json", "--schedule", "interleaved")
    refused(answer, 2, "'interleaved' holds 2 stages on each of 8 devices", "16 layers", "has 8")
