"""The proof of a GPU day runs without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.py"

pytestmark = pytest.mark.timeout(600)


def run(out: Path) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code, the rows and what was printed, of a run on the stand-in."""
    command = [sys.executable, str(SCRIPT), "--stand-in", "--small", "--out", str(out)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    results = out / "results.json"
    assert results.exists(), done.stderr[-2000:]
    rows = json.loads(results.read_text())["rows"]
    return done.returncode, rows, done.stdout


def red(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["outcome"] in ("wrong", "failed")]


@pytest.mark.slow
def test_no_row_fails_and_what_only_a_device_can_judge_is_listed(tmp_path: Path) -> None:
    code, rows, printed = run(tmp_path)
    assert (code, red(rows)) == (0, [])
    outcomes = {(row["part"], row["outcome"]) for row in rows}
    judged_here = {(part, "right") for part in ("1.1", "1.2", "1.3", "1.4", "2.1")}
    by_a_device = {(part, "not judged") for part in ("1.5", "2.1", "2.2", "2.3", "2.4")}
    assert judged_here | by_a_device <= outcomes
    assert printed.count("\nnot judged ") >= sum(row["outcome"] == "not judged" for row in rows)


def test_a_row_is_right_up_to_its_bar() -> None:
    rows = script_at("benchmarks/gpu/rows.py", "gpu_rows")
    found = [rows.under("2.3", "a", value, 0.05).outcome for value in (0.05, 0.06, float("nan"))]
    assert found == ["right", "wrong", "wrong"]
    on_stand_in = rows.Setting(stand_in=True)
    row = rows.under("2.3", "a", 0.06, 0.05)
    assert on_stand_in.by_device(row).outcome == "not judged"
    assert rows.Setting().by_device(row).outcome == "wrong"
    failed = rows.Row("2.3", "a", "", "failed")
    assert on_stand_in.by_device(failed).outcome == "failed"
