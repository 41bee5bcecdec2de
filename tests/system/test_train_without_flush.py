"""`penstock train` under schedules that update weights without a flush."""

import json
from pathlib import Path

import pytest
from training_jobs import job_file

from penstock.errors import BadInput
from penstock.jobs.job_file import find_job
from penstock.jobs.train import TrainRequest, TrainResult, train_job
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan, Stage

pytestmark = pytest.mark.timeout(280)

STAGES = (Stage(range(0, 2), (0,), (4,)), Stage(range(2, 4), (1,), (4,)))


def train(
    folder: Path, plan: Plan | None, *, resume: bool = False, **settings: object
) -> TrainResult:
    job = find_job(job_file(folder, **settings))
    schedule = "auto"
    if plan is not None:
        write_plan(plan, folder / "plan.json")
    else:
        schedule = "pipedream"
    request = TrainRequest(
        workers=2,
        plan=folder / "plan.json" if plan is not None else None,
        schedule=schedule,
        out=folder / "run",
        resume=resume,
        shown=False,
    )
    return train_job(job, request)


def records(result: TrainResult) -> list[dict[str, float]]:
    lines = (result.run_directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_and_its_resumption_record_what_the_uninterrupted_run_does(tmp_path: Path) -> None:
    plan = Plan(STAGES, 4, 4, "spectrain")
    through, halves = tmp_path / "through", tmp_path / "halves"
    through.mkdir()
    halves.mkdir()
    whole = train(through, plan)
    assert whole.steps == 6
    train(halves, plan, steps=4)
    resumed = train(halves, plan, resume=True)
    wanted = [row for row in records(whole) if "loss" in row]
    found = [row for row in records(resumed) if "loss" in row]
    assert [row["step"] for row in found] == [row["step"] for row in wanted] == list(range(1, 7))
    assert [row["loss"] for row in found] == [row["loss"] for row in wanted]
    assert {row["weight_versions/stage_0"] for row in found} == {2.0}
    assert "version_difference/stage_1" in found[-1]
    report = whole.report.read_text()
    assert "spectrain" in report
    assert whole.predicted_s > 0 and whole.measured_s > 0


def test_a_plan_is_made_for_the_schedule_that_was_asked_for(tmp_path: Path) -> None:
    result = train(tmp_path, None, steps=2)
    assert read_plan(result.plan).schedule == "pipedream"


def test_batches_cannot_be_accumulated_without_a_flush(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"accumulates over 2 batches.*set accumulate = 1"):
        train(tmp_path, Plan(STAGES, 4, 4, "2bw"), accumulate=2)
