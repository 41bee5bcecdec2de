"""The proof of a GPU day runs without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script_at
from system.gpu_benchmark_fault import FAULTS

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.py"
FAULTY = Path(__file__).parent / "gpu_benchmark_fault.py"

pytestmark = pytest.mark.timeout(600)


def run(out: Path, *arguments: str, script: Path = SCRIPT) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code, the rows and what was printed, of a run on the stand-in."""
    command = [sys.executable, str(script), *arguments, "--stand-in", "--small", "--out", str(out)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    results = out / "results.json"
    assert results.exists(), done.stderr[-2000:]
    rows = json.loads(results.read_text())["rows"]
    return done.returncode, rows, done.stdout


def red(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["outcome"] in ("wrong", "failed")]


def test_no_row_fails_and_what_only_a_device_can_judge_is_listed(tmp_path: Path) -> None:
    code, rows, printed = run(tmp_path)
    assert (code, red(rows)) == (0, [])
    outcomes = {(row["part"], row["outcome"]) for row in rows}
    judged_here = {(part, "right") for part in ("1.1", "1.2", "1.3", "1.4", "2.1")}
    by_a_device = {(part, "not judged") for part in ("1.5", "2.1", "2.2", "2.3", "2.4")}
    assert judged_here | by_a_device <= outcomes
    assert printed.count("\nnot judged ") >= sum(row["outcome"] == "not judged" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("part", FAULTS)
def test_a_planted_fault_makes_a_row_red(part: str, tmp_path: Path) -> None:
    code, rows, _ = run(tmp_path, part, "--only", part, script=FAULTY)
    wrong = red(rows)
    assert code == len(wrong) > 0
    assert {row["part"] for row in wrong} == {part}
    assert any(row["outcome"] == "wrong" for row in wrong)


ON_A_GPU = """
import sys
import gpu
import stand_in_gpu
stand_in_gpu.install(devices=1)
import judged_estimates, lonely_rank, overhead
from rows import Setting
from penstock.runtime.clock import Record

def outcomes(rows):
    return [row.outcome for row in rows if row.outcome != "told"]

setting = Setting(stand_in=False, small=True)
import torch
torch.cuda.get_device_name = lambda *_: "NVIDIA H100 80GB HBM3"

good = {"estimate_median": 1.05, "estimate_worst": 0.8, "estimate_all": 1.0, "step_s": 1.0}
good |= {"predicted_s": 1.04, "predicted_bytes": 1.05, "peak_bytes": 1.0}
subject = judged_estimates.SUBJECTS["GPT-2, float32"]
judged = lambda found: outcomes(judged_estimates.rows_of("GPT-2", subject, found, setting))
assert judged(good) == ["right"] * 4
planted = {"estimate_median": 1.2, "estimate_worst": 1.4}
planted |= {"predicted_s": 0.9, "predicted_bytes": 1.2}
for number, (key, value) in enumerate(planted.items()):
    assert judged(good | {key: value}) == ["right"] * number + ["wrong"] + ["right"] * (3 - number)

records = [Record("F", 0, 0, 0.0, 1.0), Record("I", 0, 0, 1.0, 2.0), Record("W", 0, 0, 2.0, 3.0)]
seconds = lambda *predicted: outcomes(lonely_rank.seconds_of("a", records, [predicted], setting))
assert seconds(1.2, 2.4) == ["right", "right"]
assert seconds(1.3, 2.4) == ["wrong", "right"] and seconds(1.2, 1.0) == ["right", "wrong"]

memory = lambda allocated, reserved: outcomes(
    lonely_rank.memory_of("a", 100, allocated, reserved, 0, setting)
)
assert memory(104, 109) == ["right", "right"]
assert memory(94, 109) == ["wrong", "right"] and memory(104, 111) == ["right", "wrong"]

overhead.PINNED_BAR = 1e15
overhead.ACTION_BAR_S = 0.0
assert outcomes(overhead.overhead_and_copies(setting)) == ["wrong"] * 3

import hazard
stuck = hazard.judged(hazard.ORDERS[2], float("inf"), setting)
assert stuck.outcome == "wrong" and hazard.judged(hazard.ORDERS[2], 0.1, setting).outcome == "right"
assert hazard.judged(hazard.ORDERS[0], float("inf"), setting).outcome == "told"
"""


def test_a_planted_fault_makes_a_row_red_that_only_a_device_can_judge() -> None:
    path = [str(ROOT / "benchmarks"), str(ROOT / "src"), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ON_A_GPU]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


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
