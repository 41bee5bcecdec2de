"""The built-in jobs as users run them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.jobs.job_file import find_job
from penstock.jobs.train import TrainRequest, train_job
from penstock.plan.json_file import read_plan


def test_the_default_job_starts_to_learn_on_four_workers(tmp_path: Path) -> None:
    job = replace(find_job("gpt-text"), steps=12, evaluate_every=0, checkpoint_every=0)
    result = train_job(job, TrainRequest(workers=4, out=tmp_path / "run", shown=False))
    rows = map(json.loads, (result.run_directory / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows]
    assert losses[0] == pytest.approx(5.55, abs=0.15)
    assert losses[-1] < 4.6
    assert result.checkpoint.name == "step-00000012"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_job_learns_as_promised(tmp_path: Path) -> None:
    """Its seconds are compared with predicted ones by `benchmarks/prediction.py`."""
    job = find_job("gpt-text")
    result = train_job(job, TrainRequest(workers=4, out=tmp_path / "run", shown=False))
    rows = list(map(json.loads, (result.run_directory / "metrics.jsonl").read_text().splitlines()))
    last = [row["loss"] for row in rows if "loss" in row][-20:]
    assert sum(last) / len(last) < 2.6
    assert [row["evaluation_loss"] for row in rows if "evaluation_loss" in row][-1] < 2.6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_digits_are_learnt_under_an_uneven_plan(tmp_path: Path) -> None:
    result = train_job(
        find_job("digits"), TrainRequest(workers=4, out=tmp_path / "run", shown=False)
    )
    replicas = [stage.replicas for stage in read_plan(result.plan).stages]
    assert len(replicas) > 1
    assert replicas[0] > replicas[-1]
    assert result.loss < 0.3
