"""`penstock train` leaves out a step with NaN, or goes back to the checkpoint before it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import TWO_STAGES, rows_of, train
from training_jobs import job_file

from penstock.errors import BadInput, LossNotFinite
from penstock.train.job_file import find_job
from penstock.train.train import TrainResult

pytestmark = pytest.mark.timeout(280)

OFF = {"verify": '"off"'}


def steps_of(result: TrainResult) -> list[dict[str, Any]]:
    """What was recorded of the steps."""
    return [row for row in rows_of(result.run_directory) if "evaluation_loss" not in row]


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run whose fourth batch has a NaN; it goes back to the checkpoint after step 2."""
    folder = tmp_path_factory.mktemp("back")
    return train(folder, data="nan_after_three", on_non_finite='"roll-back"', **OFF)


def test_a_run_goes_back_and_leaves_out_the_batch(rolled_back: TrainResult) -> None:
    assert rolled_back.left_out_steps == (4,)
    assert [row["step"] for row in steps_of(rolled_back)] == [1, 2, 3, 5, 6]
    assert rolled_back.checkpoint.name == "step-00000006"
    summary = json.loads((rolled_back.run_directory / "summary.json").read_text())
    assert summary["left_out_steps"] == [4]


def test_a_step_that_is_left_out_gives_the_same_losses(
    tmp_path: Path, rolled_back: TrainResult
) -> None:
    """Leaving it out and going back before it come to the same, as no weight was wrong."""
    costs = rolled_back.run_directory
    skipped = train(tmp_path, costs=costs, data="nan_after_three", on_non_finite='"skip"', **OFF)
    assert skipped.left_out_steps == (4,)
    rows = steps_of(skipped)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert "in the forward of layer '0' (stage 0, rank 0, micro-batch 0)" in rows[3]["non_finite"]
    assert "loss" not in rows[3] and skipped.report.is_file()
    others = [row["loss"] for row in rows if row["step"] != 4]
    assert others == [row["loss"] for row in steps_of(rolled_back)]


def test_a_spoilt_weight_is_healed_by_going_back_only(
    tmp_path: Path, rolled_back: TrainResult
) -> None:
    costs, spoil = rolled_back.run_directory, '["training_jobs:spoil_a_weight_once"]'
    given: dict[str, Any] = {"costs": costs, "callbacks": spoil, **OFF}
    healed = train(tmp_path / "back", on_non_finite='"roll-back"', **given)
    assert healed.left_out_steps == (4,)
    assert [row["step"] for row in steps_of(healed)] == [1, 2, 3, 5, 6]
    with pytest.raises(LossNotFinite, match=r"parameter '2.weight' of layer '2' \(stage \d, rank"):
        train(tmp_path / "skip", on_non_finite='"skip"', **given)


@pytest.mark.slow
def test_a_schedule_without_a_flush_goes_back_too(tmp_path: Path, rolled_back: TrainResult) -> None:
    costs = rolled_back.run_directory
    plan, back = replace(TWO_STAGES, schedule="pipedream"), '"roll-back"'
    result = train(tmp_path, plan, costs, data="nan_after_three", on_non_finite=back, **OFF)
    assert result.left_out_steps == (4,)
    assert [row["step"] for row in steps_of(result)] == [1, 2, 3, 5, 6]
    with pytest.raises(BadInput, match="a step cannot be left out afterwards"):
        train(tmp_path / "skip", plan, costs, on_non_finite='"skip"', **OFF)


@pytest.mark.slow
def test_a_run_that_cannot_go_back_says_so(tmp_path: Path, rolled_back: TrainResult) -> None:
    with pytest.raises(LossNotFinite, match="the run cannot go back to a checkpoint"):
        train(
            tmp_path,
            costs=rolled_back.run_directory,
            data="nan_after_three",
            on_non_finite='"roll-back"',
            checkpoint_every=5,
            **OFF,
        )
    with pytest.raises(BadInput, match="checkpoint_every = 0 does not work with on_non_finite"):
        find_job(job_file(tmp_path, on_non_finite='"roll-back"', checkpoint_every=0))
