"""Evaluations and predictions are those of the model in evaluation mode, on a path of its own."""

from functools import partial

import pytest
import torch
from runtime.evaluation.path_cases import CASES, every_case, failures_in_turn
from torch import nn

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers


@pytest.mark.timeout(600)
def test_evaluation_takes_its_own_path_and_changes_nothing() -> None:
    for rank, found in enumerate(launch_workers(every_case, workers=2, threads=1)):
        assert len(found) == len(CASES)
        assert not any(found.values()), f"rank {rank}: {found}"


def test_a_failed_evaluation_leaves_the_pipeline_usable() -> None:
    for rank, found in enumerate(launch_workers(failures_in_turn, workers=2, threads=1)):
        places = ["forward", "loss", "metric"]
        for place, message in zip(places, found, strict=True):
            assert f"stage 1, F0: {place} fails" in message, f"rank {rank}: {message}"


def test_a_batch_that_is_refused_in_evaluation_leaves_the_model_in_training_mode() -> None:
    batch = torch.randn(4, 3), torch.randn(4, 2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    graph = capture_model(model, batch, loss=nn.functional.mse_loss)
    plan = Plan((Stage(range(len(graph.layer_names)), (0,), (2,)),), 2, 2, "1f1b")
    optimizer, safety = partial(torch.optim.SGD, lr=0.1), Safety(transport="in-process")
    with Pipeline(graph, batch, plan=plan, optimizer=optimizer, safety=safety) as pipe:
        pipe.step(batch)
        with pytest.raises(BadInput, match="batch is 1 entries"):
            pipe.evaluate(batch[:1])
        assert model.training
