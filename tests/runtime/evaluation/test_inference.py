"""Predictions, metrics and callbacks see what one device would give, whatever the plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.evaluation.inference_cases import follow_events, metrics_of_plans, predict_everything
from runtime.pipeline_cases import plan_of
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.metrics import END
from penstock.runtime.options import Update
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers


@pytest.mark.timeout(600)
def test_predictions_are_those_of_the_model_in_evaluation_mode() -> None:
    for rank, found in enumerate(launch_workers(predict_everything, workers=3, threads=1)):
        assert len(found) == 6
        assert not any(found.values()), f"rank {rank}: {found}"


@pytest.mark.timeout(600)
def test_metrics_are_those_of_the_whole_batch_by_weight() -> None:
    for rank, found in enumerate(launch_workers(metrics_of_plans, workers=3, threads=1)):
        assert len(found) == 3
        assert not any(found.values()), f"rank {rank}: {found}"


def test_callbacks_follow_the_training_and_one_rank_can_end_it(tmp_path: Path) -> None:
    results = launch_workers(follow_events, (tmp_path,), workers=3, threads=1)
    for found in results:
        assert found["seen"] == [
            "step 1",
            "step 2",
            "step 3",
            "evaluation of 12",
            "saved step-00000003",
            "closing after 3",
        ]
        # Asked for after step 2 by rank 1; known to all with the next step.
        assert found["stops"] == [0, 0, END]
    first, *_, last = (found["modules"] for found in results)
    assert "transformer.wte.weight" not in first["transformer.h.0.mlp"]
    held = [found["modules"]["transformer.h.0.mlp"] for found in results]
    assert sum("c_fc.weight" in text for text in held) == 1
    elsewhere = next(text for text in held if text.startswith("BadInput"))
    assert "'transformer.h.0.mlp' is held by rank" in elsewhere
    assert "lm_head.weight" not in last["lm_head.weight"] and "weight" in last["lm_head.weight"]
    assert "did you mean 'transformer.h.0.mlp'?" in first["transformer.h.0.mpl"]
    assert "wte.weight" in first["transformer"] and "ln_f.weight" not in first["transformer"]


def pipeline_alone(*more: nn.Module, **options: object) -> Pipeline:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), *more)
    batch = (torch.randn(4, 4), torch.randint(3, (4,)))
    plan = Plan((Stage(range(2), (0,), (2,)),), 2, 2, "gpipe")
    return Pipeline(model, batch, plan=plan, loss=torch.nn.functional.cross_entropy, **options)  # type: ignore[arg-type]


def test_a_metric_that_is_no_number_is_refused_by_name() -> None:
    with (
        pipeline_alone(metrics={"scores": lambda output, target: output}) as pipe,
        pytest.raises(BadInput, match=r"metric 'scores' gave a tensor of shape \(2, 3\)"),
    ):
        pipe.step((torch.randn(4, 4), torch.randint(3, (4,))))


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(BadInput, match="metric 'a' is a int; give a function"):
        pipeline_alone(metrics={"a": 3})
    with (
        pipeline_alone() as pipe,
        pytest.raises(BadInput, match="callback 0 is a str; give functions"),
    ):
        pipe.notify("print")  # type: ignore[arg-type]


def test_stages_leave_the_scripts_random_numbers_alone() -> None:
    batch = (torch.randn(4, 4), torch.randint(3, (4,)))
    losses: list[list[float]] = []
    for seed in (0, 0, 1):
        with pipeline_alone(nn.Dropout(0.5), update=Update(seed=seed)) as pipe:
            torch.manual_seed(5)
            expected = torch.rand(3)
            torch.manual_seed(5)
            losses.append([pipe.step(batch).loss, pipe.step(batch).loss])
            assert torch.equal(torch.rand(3), expected)
    assert losses[0] == losses[1] != losses[2]
    assert losses[0][0] != losses[0][1]


@pytest.mark.parametrize(
    "loss",
    [
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy_with_logits,
    ],
)
def test_a_prediction_needs_no_target_where_the_loss_broadcasts_it(loss: Any) -> None:
    """Such losses first make the result and the target one size, so both come from one operator."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(8, 4)
    batch = x, torch.rand(8, 3)
    expected = model(x)
    plan = plan_of(len(capture_model(model, batch, loss=loss).layer_names), (1,))
    with Pipeline(model, batch, plan=plan, loss=loss, optimizer=torch.optim.SGD) as pipe:
        for given in (x, (x,), batch):
            assert torch.equal(pipe.predict(given), expected)
