import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from commands.refusals import Penstock, refused

from penstock.planners.search.search import PLANNERS
from penstock.schedule.registry import FAMILIES
from penstock.text import seconds_text

NAMES = {"planner", "schedule", "asked_schedule"}


def test_every_planner_has_a_row_the_best_first_and_search_is_never_behind(
    penstock: Penstock, problem: list[str], tmp_path: Path
) -> None:
    answer = penstock("compare", *problem, "-o", tmp_path / "rows.json", "--json")
    rows = answer.values["rows"]
    assert sorted(row["planner"] for row in rows) == sorted(PLANNERS)
    times = [row.get("iteration_s", float("inf")) for row in rows]
    assert times == sorted(times)
    (searched,) = [row for row in rows if row["planner"] == "search"]
    assert searched["iteration_s"] <= times[0] * (1 + 1e-9)
    promised = set(penstock("plan", *problem, "--planner", "dapple", "--json").values)
    for row in rows:
        keys = promised if "iteration_s" in row else {"infeasible", "planning_s"}
        assert set(row) == keys | NAMES
        assert row["asked_schedule"] == "auto"
    assert json.loads((tmp_path / "rows.json").read_text()) == answer.values


def test_a_named_schedule_is_the_schedule_of_all_its_plans(
    penstock: Penstock, problem: list[str]
) -> None:
    arguments = ["--planners", "search,data-parallel", "--schedules", "gpipe"]
    rows = penstock("compare", *problem, *arguments, "--json").values["rows"]
    assert {(row["planner"], row["schedule"]) for row in rows} == {
        ("search", "gpipe"),
        ("data-parallel", "gpipe"),
    }
    assert rows[0]["planner"] == "search"


def test_all_stands_for_every_synchronous_schedule_alone(
    penstock: Penstock, problem: list[str]
) -> None:
    arguments = ["--planners", "data-parallel", "--schedules", "all,auto", "--json"]
    rows = penstock("compare", *problem, *arguments).values["rows"]
    kept = [name for name, family in FAMILIES.items() if family.flushes]
    wanted = sorted([*kept, "auto"])
    assert sorted(row["asked_schedule"] for row in rows) == wanted


def test_people_get_a_table_and_progress_row_by_row(penstock: Penstock, problem: list[str]) -> None:
    answer = penstock("compare", *problem, "--planners", "dapple,single-device")
    best, bound, *_ = answer.output.splitlines()
    assert best.startswith("dapple: ") and " stages, " in best
    assert bound.startswith("no plan takes less than ")
    lines = answer.output.splitlines()
    header = next(line for line in lines if line.split()[:1] == ["planner"]).split()
    assert header[:3] == ["planner", "schedule", "iteration"]
    assert "single-device: " in answer.errors and "planned in" in answer.errors
    assert "single-device: " not in answer.output
    quiet = penstock("compare", *problem, "--planners", "single-device", "--quiet")
    assert quiet.errors == ""


def test_a_planner_without_a_plan_is_a_line_with_its_reason(
    penstock: Penstock, problem: list[str], tmp_path: Path
) -> None:
    cluster = tmp_path / "four.toml"
    cluster.write_text(cluster.read_text().replace("60000000.0", "20000000.0"))
    answer = penstock("compare", *problem, "--planners", "single-device,dynamic-program")
    assert answer.code == 0
    (line,) = [line for line in answer.output.splitlines() if "finds no plan that fits" in line]
    assert line.startswith("single-device, auto: ")
    few = ["--planners", "single-device,dynamic-program", "--json"]
    rows = penstock("compare", *problem, *few).values["rows"]
    assert [row["planner"] for row in rows] == ["dynamic-program", "single-device"]


def test_explain_says_what_binds_every_plan_and_why_the_winner_won(
    penstock: Penstock, problem: list[str]
) -> None:
    few = ["--planners", "dapple,data-parallel,single-device", "--explain"]
    answer = penstock("compare", *problem, *few)
    assert "Bound by " in answer.output and "Critical path: " in answer.output
    assert "Why dapple won: " in answer.output
    values = penstock("compare", *problem, *few, "--json").values
    assert any("loses" in reason for reason in values["why"])
    for row in values["rows"]:
        if "explanation" in row:
            total_s = sum(row["explanation"]["critical_path_s"].values())
            assert total_s == pytest.approx(row["iteration_s"])


def test_plan_explains_its_plan(penstock: Penstock, problem: list[str]) -> None:
    asked = [*problem, "--planner", "dapple", "--explain"]
    assert "Bound by " in penstock("plan", *asked).output
    values = penstock("plan", *asked, "--json").values
    assert values["explanation"]["words"][0].startswith("Bound by ")


def test_the_picture_shows_every_planner_with_its_iteration_and_the_bound(
    penstock: Penstock, problem: list[str], tmp_path: Path
) -> None:
    picture = tmp_path / "compare.svg"
    few = ["--planners", "dapple,spp,single-device"]
    values = penstock("compare", *problem, *few, "--picture", picture, "--json").values
    words = " ".join(node.text for node in ET.parse(picture).iter() if node.text)
    for row in values["rows"]:
        if "iteration_s" in row:
            assert f"{row['planner']} ({row['schedule']})" in words
            assert seconds_text(row["iteration_s"]) in words
    assert "no plan takes less than" in words


def test_a_page_holds_timelines_and_explanation_and_needs_nothing_else(
    penstock: Penstock, problem: list[str], tmp_path: Path
) -> None:
    page = tmp_path / "compare.html"
    few = ["--planners", "dynamic-program,single-device", "--quiet"]
    assert penstock("compare", *problem, *few, "--picture", page).code == 0
    text = page.read_text()
    assert text.count('<canvas id="chart"') == 1 and ">Limited by</th>" in text
    assert '"title":"dynamic-program: ' in text and "No plan takes less than" in text
    rows = re.findall(r'data-head="Planner">([^<]+)<', text)
    assert sorted(rows) == ["dynamic-program", "single-device"]
    assert "Why dynamic-program won" in text
    assert "src=" not in text and "://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_picture_of_another_format_is_refused_before_anything_is_planned(
    penstock: Penstock, problem: list[str]
) -> None:
    answer = penstock("compare", *problem, "--picture", "x.gif")
    refused(answer, 2, "must end in .svg, .pdf, .png or .html")


def test_without_matplotlib_one_line_says_what_to_install(
    penstock: Penstock, problem: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = penstock("compare", *problem, "--picture", "x.png")
    refused(answer, 2, "pip install 'penstock[plot]'")
