"""`penstock train` under schedules that update weights without a flush."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from training_jobs import job_file

from penstock.errors import BadInput
from penstock.jobs.job_file import find_job
from penstock.jobs.train import TrainRequest, TrainResult, train_job
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan, Stage

pytestmark = pytest.mark.timeout(280)

SPECTRAIN = Plan(
    (Stage(range(0, 2), (0,), (4,)), Stage(range(2, 4), (1,), (4,))), 4, 4, "spectrain"
)


def train(
    folder: Path,
    plan: Plan | None,
    costs: Path | None = None,
    *,
    resume: bool = False,
    **settings: object,
) -> TrainResult:
    """Train the small job in ``folder``, by a plan or under ``pipedream``."""
    folder.mkdir(exist_ok=True)
    directory = folder / "run"
    if costs is not None and not resume:
        directory.mkdir()
        shutil.copy(costs / "profile.json", directory)
        shutil.copy(costs / "cluster.toml", directory)
    if plan is not None:
        write_plan(plan, folder / "plan.json")
    request = TrainRequest(
        workers=2,
        plan=folder / "plan.json" if plan is not None else None,
        schedule="auto" if plan is not None else "pipedream",
        out=directory,
        resume=resume,
        shown=False,
    )
    return train_job(find_job(job_file(folder, **settings)), request)


def steps(result: TrainResult) -> list[dict[str, float]]:
    """What was recorded of each step."""
    lines = (result.run_directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """An uninterrupted run, with checkpoints after every second step."""
    return train(tmp_path_factory.mktemp("whole"), SPECTRAIN)


def test_a_run_records_copies_and_staleness(whole: TrainResult) -> None:
    rows = steps(whole)
    assert whole.steps == 6
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert {row["weight_versions/stage_0"] for row in rows} == {2.0}
    assert "version_difference/stage_1" in rows[-1]
    assert "spectrain" in whole.report.read_text()
    assert whole.predicted_s > 0 and whole.measured_s > 0


def test_the_memory_of_its_first_steps_is_measured(whole: TrainResult) -> None:
    """Near the simulator's, which does not know what a stage has for a moment while it runs: some
    kilobytes, of which this job has few."""
    summary = json.loads((whole.run_directory / "summary.json").read_text())
    predicted = summary["predicted_peak_memory_bytes"]
    measured = summary["measured_peak_memory_bytes"]
    assert len(measured) == 2
    for expected, found in zip(predicted, measured, strict=True):
        assert 0.9 * expected <= found <= 1.5 * expected + 65536


def test_a_resumed_run_goes_on_as_the_uninterrupted_one(whole: TrainResult, tmp_path: Path) -> None:
    train(tmp_path, SPECTRAIN, whole.run_directory, steps=4)
    resumed = train(tmp_path, SPECTRAIN, resume=True)
    assert [row["loss"] for row in steps(resumed)] == [row["loss"] for row in steps(whole)]


def test_a_plan_is_made_for_the_schedule_that_was_asked_for(
    whole: TrainResult, tmp_path: Path
) -> None:
    result = train(tmp_path, None, whole.run_directory, steps=2)
    assert read_plan(result.plan).schedule == "pipedream"


def test_batches_cannot_be_accumulated_without_a_flush(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"accumulate = 2 does not work with .*set it to 1"):
        train(tmp_path, replace(SPECTRAIN, schedule="2bw"), accumulate=2)
