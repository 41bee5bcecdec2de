"""`penstock train` with pipelines that meet seldom: the weights of a plain loop."""

import copy
from pathlib import Path

import pytest
import torch
from small_runs import train, weights_in
from torch import nn
from training_jobs import job_file

from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.train.job_file import find_job
from penstock.train.optimizers import optimizer_factory

pytestmark = pytest.mark.timeout(280)

LAYERS = 4  # three linear ones and the loss
# Replicas of one stage, so each pipeline has every other pair of rows.
ROWS = [[row for row in range(16) if row // 2 % 2 == pipeline] for pipeline in (0, 1)]


def test_the_final_weights_are_those_of_a_plain_loop_after_a_last_meeting(tmp_path: Path) -> None:
    settings = {"meet_every": 4, "outer_momentum": 0.5, "clip_norm": 0.0, "steps": 6}
    pair = Plan((Stage(range(LAYERS), (0, 1), (2, 2)),), 4, 4, "1f1b")
    train(tmp_path, pair, save_weights='"weights"', **settings)
    job = find_job(tmp_path / "small.toml")
    torch.manual_seed(job.seed)
    model = job.model()
    models = [copy.deepcopy(model) for _ in ROWS]
    optimizers = [optimizer_factory(job.optimizer)(m.named_parameters()) for m in models]
    outer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, nesterov=True)
    for step, (x, y) in zip(range(1, 7), job.batches("train"), strict=False):
        for one, optimizer, rows in zip(models, optimizers, ROWS, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(one(x[rows]), y[rows]).backward()
            # A job's rate rises from zero in the first steps.
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * min(1.0, step / job.optimizer.warm_up_steps)
            optimizer.step()
        if step in (4, 6):
            every = (m.parameters() for m in (model, *models))
            with torch.no_grad():
                for last, first, second in zip(*every, strict=True):
                    last.grad = last - (first + second) / 2
                outer.step()
                for one in models:
                    one.load_state_dict(model.state_dict())
    weights = weights_in(tmp_path / "weights")
    for name, weight in model.named_parameters():
        assert torch.allclose(weights[name], weight, rtol=1e-4, atol=1e-6), name


def test_a_plan_of_one_pipeline_is_refused_before_workers_start(tmp_path: Path) -> None:
    one = Plan((Stage(range(LAYERS), (1,), (4,)),), 4, 4, "1f1b")
    with pytest.raises(BadInput, match="the plan is one pipeline, which has no other to meet"):
        train(tmp_path, one, meet_every=4)


def test_an_outer_step_without_meetings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="set meet_every to a number of steps"):
        find_job(job_file(tmp_path, outer_momentum=0.9))
