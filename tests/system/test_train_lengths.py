"""A job whose batches have different lengths: found in its data, planned for, reported apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan, Stage

pytestmark = pytest.mark.timeout(280)

TWO_STAGES = Plan((Stage(range(0, 2), (0,), (4,)), Stage(range(2, 4), (1,), (4,))), 2, 4, "1f1b")

JOB = """
model = "length_jobs:build"
data = "length_jobs:batches"
loss = "length_jobs:loss"
batch_size = 8
steps = {steps}
evaluate_every = 10
dynamic = "auto"
"""


def test_a_run_tells_predictions_and_measurements_by_length(
    penstock: Callable[..., Any], tmp_path: Path
) -> None:
    job, plan, run = tmp_path / "words.toml", tmp_path / "plan.json", tmp_path / "run"
    write_plan(TWO_STAGES, plan)
    (tmp_path / "length_jobs.py").write_text((Path(__file__).parent / "length_jobs.py").read_text())
    job.write_text(JOB.format(steps=20))
    done = penstock("train", job, "--workers", 2, "--plan", plan, "--out", run)
    assert done.code == 0, done.errors
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lengths = [row["lengths"]["length"] for row in rows if "lengths" in row]
    assert lengths == [6, 640] * 10
    summary = json.loads((run / "summary.json").read_text())
    short, long = summary["by_length"]
    assert (short["lengths"], long["lengths"]) == ({"length": 6}, {"length": 640})
    assert (short["share"], long["share"]) == (0.5, 0.5)
    # Three steps warm up: a short one more than long ones.
    assert (short["steps"], long["steps"]) == (8, 9)
    assert summary["predicted_s"] == pytest.approx((short["predicted_s"] + long["predicted_s"]) / 2)
    assert summary["measured_s"] == pytest.approx(
        (8 * short["measured_s"] + 9 * long["measured_s"]) / 17
    )
    assert short["predicted_s"] < long["predicted_s"]
    assert "  length 6: predicted " in done.output
    assert "over 9 steps" in done.output
    assert "Lengths of the batches" in (run / "report.html").read_text()
