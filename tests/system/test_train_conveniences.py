"""Metrics and callbacks of a job: in its records, on its display, and able to end it."""

from pathlib import Path

import pytest
from small_runs import rows_of, train

from penstock.runtime.checkpoints.checkpoint import complete_in


@pytest.mark.timeout(280)
def test_metrics_are_recorded_and_a_callback_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    close = '{ close = "training_jobs:closeness" }'
    stop = '["training_jobs:log_and_stop"]'
    result = train(tmp_path, callbacks=stop, metrics=close, steps=20)
    assert result.steps == 5
    rows = rows_of(result.run_directory)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    assert all(0 <= row["close"] <= 1 for row in steps)
    (evaluation,) = (row for row in rows if "evaluation_loss" in row)
    assert evaluation["step"] == 3 and 0 <= evaluation["evaluation_close"] <= 1
    events = (tmp_path / "events.txt").read_text().split()
    assert events[:5] == ["StepMetrics", "StepMetrics", "Saved", "StepMetrics", "Evaluation"]
    # One evaluation of two batches, three checkpoints: after steps 2, 4 and the last.
    assert (events.count("Evaluation"), events.count("Saved")) == (1, 3)
    assert events[-1] == "Closing"


@pytest.mark.timeout(280)
def test_a_run_that_gets_no_better_ends_and_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    settings = {"evaluate_every": 1, "stop_early": 2, "keep_best": "true", "steps": 20}
    result = train(tmp_path, changes=["optimizer.learning_rate=0.0"], **settings)
    assert result.steps == 4
    (best,) = complete_in(result.run_directory / "best")
    assert best.name == "step-00000001"
