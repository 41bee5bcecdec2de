"""The built-in jobs as users run them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import losses, rows_of
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.examples import digits
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan, Stage
from penstock.train.job_file import find_job
from penstock.train.train import TrainRequest, train_job


def test_the_default_job_starts_to_learn_on_four_workers(tmp_path: Path) -> None:
    job = replace(find_job("gpt-text"), steps=6, evaluate_every=0, checkpoint_every=0)
    result = train_job(job, TrainRequest(workers=4, out=tmp_path / "run", shown=False))
    found = losses(result.run_directory)
    assert found[1] == pytest.approx(5.55, abs=0.15)
    assert found[6] < 5.2
    plan = read_plan(result.plan)
    assert plan.schedule == "1f1b"
    assert sorted(stage.devices for stage in plan.stages) == [(0,), (1,), (2,), (3,)]
    assert result.checkpoint.name == "step-00000006"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_job_learns_as_promised(tmp_path: Path) -> None:
    """Its seconds are compared with predicted ones by `benchmarks/prediction`."""
    job = find_job("gpt-text")
    result = train_job(job, TrainRequest(workers=4, out=tmp_path / "run", shown=False))
    last = list(losses(result.run_directory).values())[-20:]
    assert sum(last) / len(last) < 2.6
    rows = rows_of(result.run_directory)
    assert [row["evaluation_loss"] for row in rows if "evaluation_loss" in row][-1] < 2.6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_digits_are_learnt_under_an_uneven_plan(tmp_path: Path) -> None:
    """Three replicas of the convolutions feed the dense part; which plan is the quickest depends on
    the machine, so it is given here."""
    example = torch.zeros(6, 1, 8, 8), torch.zeros(6, dtype=torch.long)
    graph = capture_model(digits.build_model(), example, loss=functional.cross_entropy)
    layers = len(graph.layer_names)
    dense = next(i for i, name in enumerate(graph.layer_names) if name.startswith("dense"))
    convolutions = Stage(range(dense), (0, 1, 2), (8, 8, 8))
    plan = Plan((convolutions, Stage(range(dense, layers), (3,), (24,))), 4, 24, "1f1b")
    write_plan(plan, tmp_path / "plan.json")
    request = TrainRequest(
        workers=4, plan=tmp_path / "plan.json", out=tmp_path / "run", shown=False
    )
    result = train_job(find_job("digits"), request)
    assert [stage.replicas for stage in read_plan(result.plan).stages] == [3, 1]
    assert result.loss < 0.3
