"""`penstock train` under schedules that update weights without a flush."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import TWO_STAGES, losses, rows_of, train

from penstock.errors import BadInput
from penstock.plan.json_file import read_plan
from penstock.train.train import TrainResult

pytestmark = pytest.mark.timeout(280)

SPECTRAIN = replace(TWO_STAGES, schedule="spectrain")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """An uninterrupted run, with checkpoints after every second step."""
    return train(tmp_path_factory.mktemp("whole"), SPECTRAIN)


def test_a_run_records_copies_and_staleness(whole: TrainResult) -> None:
    rows = [row for row in rows_of(whole.run_directory) if "loss" in row]
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
    assert losses(resumed.run_directory) == losses(whole.run_directory)


def test_a_plan_is_made_for_the_schedule_that_was_asked_for(
    whole: TrainResult, tmp_path: Path
) -> None:
    asked = '{ schedule = "pipedream" }'
    result = train(tmp_path, None, whole.run_directory, constraints=asked, steps=2)
    assert read_plan(result.plan).schedule == "pipedream"


def test_batches_cannot_be_accumulated_without_a_flush(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"accumulate = 2 does not work with .*set it to 1"):
        train(tmp_path, replace(SPECTRAIN, schedule="2bw"), accumulate=2)
