"""A job's trackers: every step of a run and of its continuations, and a failure that ends nothing.

Neither library is installed where this runs: modules with their signatures stand in for them.
"""

from pathlib import Path

import pytest
from small_runs import rows_of, train

from penstock.errors import BadInput

STAND_INS = Path(__file__).parents[1] / "runtime" / "trackers" / "stand_ins"


@pytest.mark.timeout(280)
def test_a_resumed_run_goes_on_in_its_trackers_and_without_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told := tmp_path / "told").mkdir()
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setenv("TOLD", str(told / "metrics.jsonl"))
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    run, both = tmp_path / "run", '["wandb", "mlflow"]'
    train(tmp_path, trackers=both, steps=4)
    train(tmp_path, trackers=both, steps=6, resume=True)
    calls = rows_of(told)
    starts = [call for call in calls if call["call"] == "init"]
    assert {call["project"] for call in starts} == {"small"}
    assert {call["id"] for call in starts} == {
        (run / "trackers" / f"{name}.id").read_text().strip() for name in ("wandb", "mlflow")
    }
    # A start of each tracker by rank 0 alone, in both parts of the run.
    assert len(starts) == 4
    config = next(call["config"] for call in starts if call.get("config"))
    assert (config["batch_size"], config["schedule"]) == (16, "1f1b")
    assert float(config["optimizer.learning_rate"]) == 0.01
    recorded = rows_of(run)
    losses = {row["step"]: row["loss"] for row in recorded if "loss" in row}
    held_out = {row["step"]: row["evaluation_loss"] for row in recorded if "evaluation_loss" in row}
    assert (list(losses), list(held_out)) == ([1, 2, 3, 4, 5, 6], [3, 6])
    shown = [(c["step"], c["values"]) for c in calls if c["call"] == "log"]
    for key, values in (("loss", losses), ("evaluation_loss", held_out)):
        found = [(step, row[key]) for step, row in shown if key in row]
        assert sorted(found) == sorted(2 * list(values.items()))
    monkeypatch.setenv("TROUBLE", "init")
    assert train(tmp_path, trackers=both, steps=8, resume=True).steps == 8
    assert rows_of(told) == calls


def test_a_package_that_is_missing_is_named_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.trackers.find_spec", lambda name: None)
    with pytest.raises(BadInput) as refused:
        train(tmp_path, trackers='["wandb"]')
    assert str(refused.value) == (
        "job 'small' names tracker 'wandb', and the package wandb is not installed; install it "
        "or leave the tracker out"
    )
    assert not (tmp_path / "run").exists()
