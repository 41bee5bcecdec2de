"""What the results of the planning benchmark must show."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "benchmarks" / "planning"
PAGE = ROOT / "docs" / "benchmarks" / "planning.md"


@pytest.fixture(scope="module")
def tables() -> Any:
    sys.path.insert(0, str(FOLDER))
    return script_at("benchmarks/planning/tables.py", "planning_tables")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))["rows"]


def test_search_is_behind_no_plan_of_any_row(tables: Any, rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 60
    assert {row["model"] for row in rows if tables.behind(row) or "failed" in row} == set()


def test_a_row_on_which_search_is_behind_is_told(tables: Any, rows: list[dict[str, Any]]) -> None:
    row = rows[0]
    best = tables.search_of(row)["iteration_s"]
    faster = {"planner": "dapple", "schedule": "zb-v", "iteration_s": 0.99 * best}
    assert tables.behind(row) == ""
    assert tables.behind(row | {"every_schedule": {"best": faster}}) == "dapple under zb-v"


def test_whole_processes_are_within_their_limits() -> None:
    rows = json.loads((FOLDER / "speed.json").read_text(encoding="utf-8"))["speeds"]
    page = PAGE.read_text(encoding="utf-8")
    over = [row["name"] for row in rows if row["cpu_s"] > row["budget_s"] or row["exit_code"]]
    assert over == []
    assert "All rows are within their limits" in page
