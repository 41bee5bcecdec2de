"""`penstock train` leaves out a step with NaN, or goes back to the checkpoint before it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from training_jobs import job_file

from penstock.errors import BadInput, LossNotFinite
from penstock.jobs.job_file import find_job
from penstock.jobs.train import TrainRequest, TrainResult, train_job
from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan, Stage

pytestmark = pytest.mark.timeout(280)

STAGES = (Stage(range(0, 2), (0,), (4,)), Stage(range(2, 4), (1,), (4,)))


def train(folder: Path, costs: Path | None, schedule: str = "1f1b", **settings: Any) -> TrainResult:
    """Train the small job in ``folder``."""
    directory = folder / "run"
    directory.mkdir(parents=True)
    if costs is not None:
        shutil.copy(costs / "profile.json", directory)
        shutil.copy(costs / "cluster.toml", directory)
    write_plan(Plan(STAGES, 4, 4, schedule), folder / "given.json")
    request = TrainRequest(workers=2, plan=folder / "given.json", out=directory, shown=False)
    return train_job(find_job(job_file(folder, verify='"off"', **settings)), request)


def rows_of(result: TrainResult) -> list[dict[str, Any]]:
    """What was recorded of the steps."""
    lines = (result.run_directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "evaluation_loss" not in row]


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run whose fourth batch has a NaN; it goes back to the checkpoint after step 2."""
    folder = tmp_path_factory.mktemp("back")
    return train(folder, None, data="nan_after_three", on_non_finite='"roll-back"')


def test_a_run_goes_back_and_leaves_out_the_batch(rolled_back: TrainResult) -> None:
    assert rolled_back.left_out_steps == (4,)
    assert [row["step"] for row in rows_of(rolled_back)] == [1, 2, 3, 5, 6]
    assert rolled_back.checkpoint.name == "step-00000006"
    summary = json.loads((rolled_back.run_directory / "summary.json").read_text())
    assert summary["left_out_steps"] == [4]


def test_a_step_that_is_left_out_gives_the_same_losses(
    tmp_path: Path, rolled_back: TrainResult
) -> None:
    """Leaving it out and going back before it come to the same, as no weight was wrong."""
    costs = rolled_back.run_directory
    skipped = train(tmp_path, costs, data="nan_after_three", on_non_finite='"skip"')
    assert skipped.left_out_steps == (4,)
    rows = rows_of(skipped)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert "in the forward of layer '0' (stage 0, rank 0, micro-batch 0)" in rows[3]["non_finite"]
    assert "loss" not in rows[3] and skipped.report.is_file()
    others = [row["loss"] for row in rows if row["step"] != 4]
    assert others == [row["loss"] for row in rows_of(rolled_back)]


def test_a_spoilt_weight_is_healed_by_going_back_only(
    tmp_path: Path, rolled_back: TrainResult
) -> None:
    costs, spoil = rolled_back.run_directory, '["training_jobs:spoil_a_weight_once"]'
    healed = train(tmp_path / "back", costs, callbacks=spoil, on_non_finite='"roll-back"')
    assert healed.left_out_steps == (4,)
    assert [row["step"] for row in rows_of(healed)] == [1, 2, 3, 5, 6]
    with pytest.raises(LossNotFinite, match=r"parameter '2.weight' of layer '2' \(stage \d, rank"):
        train(tmp_path / "skip", costs, callbacks=spoil, on_non_finite='"skip"')


@pytest.mark.slow
def test_a_schedule_without_a_flush_goes_back_too(tmp_path: Path, rolled_back: TrainResult) -> None:
    costs = rolled_back.run_directory
    result = train(
        tmp_path, costs, "pipedream", data="nan_after_three", on_non_finite='"roll-back"'
    )
    assert result.left_out_steps == (4,)
    assert [row["step"] for row in rows_of(result)] == [1, 2, 3, 5, 6]
    with pytest.raises(BadInput, match="a step cannot be left out afterwards"):
        train(tmp_path / "skip", costs, "pipedream", on_non_finite='"skip"')


@pytest.mark.slow
def test_a_run_that_cannot_go_back_says_so(tmp_path: Path, rolled_back: TrainResult) -> None:
    with pytest.raises(LossNotFinite, match="the run cannot go back to a checkpoint"):
        train(
            tmp_path,
            rolled_back.run_directory,
            data="nan_after_three",
            on_non_finite='"roll-back"',
            checkpoint_every=5,
        )
    with pytest.raises(BadInput, match="checkpoint_every = 0 does not work with on_non_finite"):
        find_job(job_file(tmp_path, on_non_finite='"roll-back"', checkpoint_every=0))
