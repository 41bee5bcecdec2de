"""`penstock train` names a rank that becomes slow, and says what planning again would bring."""

import json
from pathlib import Path
from typing import Any

import pytest
from training_jobs import job_file

from penstock.jobs.job_file import find_job
from penstock.jobs.train import TrainRequest, train_job
from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan, Stage

pytestmark = pytest.mark.timeout(280)

STAGES = (Stage(range(0, 2), (0,), (4,)), Stage(range(2, 4), (1,), (4,)))


def test_a_rank_that_sleeps_in_its_layers_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_plan(Plan(STAGES, 4, 4, "1f1b"), tmp_path / "given.json")
    job = job_file(
        tmp_path, steps=16, verify='"off"', callbacks='["training_jobs:slow_down_rank_one"]'
    )
    request = TrainRequest(workers=2, plan=tmp_path / "given.json", out=tmp_path / "run")
    result = train_job(find_job(job), request)
    said = capfd.readouterr().err.splitlines()
    first, *_, again = result.drift
    assert first.startswith("stage 1 on rank 1 is a straggler: "), result.drift
    assert again.startswith("planning again with these times would")
    # On a busy machine the prediction may be wrong by more than a new plan gains.
    notes = [f"{first}; {again}"] if " would take a step from " in again else []
    assert [line for line in said if "straggler" in line] == notes
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["drift"] == list(result.drift)
    assert "stage 1 on rank 1 is a straggler" in result.report.read_text()
    board = b"".join(p.read_bytes() for p in (tmp_path / "run" / "tensorboard").iterdir())
    assert b"drift/stage_1_rank_1" in board and b"drift/all_ranks" in board


def test_a_run_plans_again_at_a_checkpoint_and_follows_the_plan(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_plan(Plan(STAGES, 4, 4, "1f1b"), tmp_path / "given.json")
    job = job_file(
        tmp_path,
        steps=30,
        verify='"off"',
        checkpoint_every=5,
        callbacks='["training_jobs:slow_down_rank_one"]',
    )
    request = TrainRequest(
        workers=2,
        plan=tmp_path / "given.json",
        out=tmp_path / "run",
        replan=True,
    )
    result = train_job(find_job(job), request)
    said = capfd.readouterr().err.splitlines()
    planned = [line for line in result.drift if ": planning again" in line]
    assert planned
    followed = [line for line in planned if line.endswith("; the run follows the new plan")]
    notes = [line.partition("; step ")[2] for line in said if "straggler" in line]
    assert [f"step {note}" for note in notes] == followed
    assert all(int(line.split(":")[0].removeprefix("step ")) % 5 == 0 for line in planned)
    assert said.count("starting 2 workers") == 1
    assert sum(line.startswith("plan: ") for line in said) == 1 + len(planned)
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 31))
