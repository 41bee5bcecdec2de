"""A schedule that follows a metric has the rates that torch gives it, also after a checkpoint."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from penstock import BadInput, Pipeline, Plan, Safety, Stage, Update, capture_model

PLAN = Plan((Stage(range(2), (0,), (4,)), Stage(range(2, 3), (1,), (4,))), 2, 4, "1f1b")
BATCHES = [
    (torch.randn(8, 6, dtype=torch.float64, generator=g), torch.randint(3, (8,), generator=g))
    for g in [torch.Generator().manual_seed(1)]
    for _ in range(10)
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)


def pipeline(schedule: Any = plateau, plan: Plan = PLAN, **update: Any) -> Pipeline:
    graph = capture_model(model(), BATCHES[0], loss=cross_entropy)
    return Pipeline(
        graph,
        BATCHES[0],
        plan=plan,
        optimizer=sgd,
        learning_rate_schedule=schedule,
        update=Update(**update),
        safety=Safety(transport="in-process"),
    )


def alone(*, by_evaluation: bool) -> tuple[nn.Module, list[float]]:
    """The model and the rates of each step, trained by torch in one process."""
    own, rates = model(), list[float]()
    optimizer = sgd(own.parameters())
    schedule = plateau(optimizer)
    for x, y in BATCHES:
        optimizer.zero_grad()
        loss = cross_entropy(own(x), y)
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if by_evaluation:
            with torch.no_grad():
                loss = cross_entropy(own(BATCHES[0][0]), BATCHES[0][1])
        schedule.step(loss.item())
    return own, rates


@pytest.mark.parametrize("by_evaluation", [False, True])
def test_plateau_has_torchs_rates_also_after_a_checkpoint(
    tmp_path: Path, by_evaluation: bool
) -> None:
    own, rates = alone(by_evaluation=by_evaluation)
    assert len(set(rates)) > 2
    follows = "evaluation" if by_evaluation else "loss"
    found = list[float]()

    def train(pipe: Pipeline, batches: Any) -> None:
        for batch in batches:
            found.append(pipe.step(batch).learning_rate)
            if by_evaluation:
                pipe.step_schedule(pipe.evaluate(BATCHES[0]).loss)

    with pipeline(schedule_follows=follows) as pipe:
        train(pipe, BATCHES[:6])
        pipe.save(tmp_path)
    with pipeline(schedule_follows=follows) as pipe:
        assert pipe.load(tmp_path) == 6
        train(pipe, BATCHES[6:])
        weights = pipe.model_state_dict()
    assert found == rates
    for name, expected in own.state_dict().items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-9, atol=1e-12)


def test_a_step_that_is_left_out_is_not_followed() -> None:
    bad = (torch.full_like(BATCHES[0][0], torch.nan), BATCHES[0][1])
    with pipeline(on_non_finite="skip") as pipe:
        pipe.step(BATCHES[0])
        before: Any = copy.deepcopy(pipe.state_dict()["state"]["schedule"])
        assert pipe.step(bad).skipped
        assert pipe.state_dict()["state"]["schedule"] == before


def test_what_cannot_follow_is_refused() -> None:
    with (
        pipeline() as pipe,
        pytest.raises(BadInput, match=r"step\(\) steps .*\(ReduceLROnPlateau\)"),
    ):
        pipe.step_schedule(1.0)
    with (
        pipeline(lambda o: LambdaLR(o, lambda n: 1.0), schedule_follows="evaluation") as pipe,
        pytest.raises(BadInput, match=r"\(LambdaLR\) by itself"),
    ):
        pipe.step_schedule(1.0)
    with pytest.raises(BadInput, match='schedule_follows is "accuracy"'):
        Update(schedule_follows="accuracy")  # pyright: ignore[reportArgumentType]
