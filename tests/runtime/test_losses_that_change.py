"""Losses that change while training goes on: every step is right, or it is refused in a line."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.changing_losses import (
    Case,
    Net,
    batches,
    cases,
    differences,
    net,
    pipeline,
    plan_of,
    run_cases,
    run_refused,
)
from torch import nn

from penstock.errors import PenstockError
from penstock.plan.plan import Plan
from penstock.runtime.options import Safety
from penstock.runtime.processes.launch import launch_workers

HERE = Safety(transport="in-process")


@pytest.mark.parametrize("name", cases())
def test_every_step_is_that_of_one_process(name: str) -> None:
    assert [*differences(name, plan_of((1, 1)), safety=HERE)] == []


IN_PROCESSES = [
    "a term is switched on",
    "a term is left out, and comes back",
    "the mean becomes a sum",
    "a rare term of one row",
    "a term of early activations, in the model",
]


@pytest.mark.parametrize("replicas", [pytest.param((1, 1), marks=pytest.mark.slow), (1, 2)])
def test_ranks_agree_on_the_path(replicas: tuple[int, ...]) -> None:
    given = IN_PROCESSES, plan_of(replicas)
    for wrong in launch_workers(run_cases, given, workers=sum(replicas), threads=1):
        assert wrong == []


def by_activations(o: Any, y: torch.Tensor) -> torch.Tensor:
    loss = o[1].square().mean()
    if NOW.step and (o[0] > -100).all():
        loss = loss + o[0].square().sum()
    return loss


class Counting(nn.Module):
    calls = 0

    def forward(self, o: Any, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = o[1].square().mean()
        return loss + o[0].square().sum() if self.calls > 3 else loss


def more_each_step(o: Any, y: torch.Tensor) -> torch.Tensor:
    return sum((o[0].square().sum() for _ in range(NOW.step)), o[1].square().mean())


def later(o: Any, y: torch.Tensor) -> torch.Tensor:
    loss = o[1].square().mean()
    return loss + o[0].square().sum() if NOW.step else loss


NOW = SimpleNamespace(step=0)
REFUSED: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "by a counter": (Counting(), "1f1b", {}, "activations or a counter decide about it"),
    "in every step": (more_each_step, "1f1b", {}, "the loss has taken 16 paths"),
    "without a flush": (later, "pipedream", {}, "the loss takes another path than recorded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused_and_not_trained(name: str) -> None:
    loss, schedule, options, words = REFUSED[name]
    case = Case(loss, now=NOW)
    model = net(case)
    plan = plan_of((1, 1), schedule)
    with (
        pipeline(case, model, plan, verify="off", safety=HERE, **options) as pipe,
        pytest.raises(PenstockError, match=f"{words}.*"),
    ):
        for NOW.step, (x, y) in enumerate(batches(18)):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            pipe.step((x[:5], y[:5]))
    if schedule == "1f1b":
        assert all(map(torch.equal, before, model.parameters()))


def test_activations_of_one_rank_decide_nothing() -> None:
    for found in launch_workers(run_refused, (plan_of((1, 1)),), workers=2, threads=1):
        assert "needs bool() of a tensor of another stage, which only one rank has" in found
        assert "`if now.step and (o[0] > -100).all():`" in found


def test_a_batch_in_one_piece_may_take_any_path() -> None:
    """Activations decide about it, and they have them all."""
    case = Case(by_activations, now=NOW)
    model = net(case)
    stages = tuple(replace(stage, slices=(8,)) for stage in plan_of((1, 1)).stages)
    plan = Plan(stages, 1, 8, "1f1b")
    with pipeline(case, model, plan, safety=HERE) as pipe:
        for NOW.step, (x, y) in enumerate(batches(3)):
            expected = by_activations(model(x), y).item()
            assert pipe.step((x, y)).loss == pytest.approx(expected, rel=1e-12)


def test_a_step_that_is_taken_again_counts_its_state_once() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
            self.seen = 0

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            self.seen += 1
            a, b = super().forward(x)
            return a, self.norm(torch.cat([a, b, b], 1))

    found: list[torch.Tensor] = []
    for alike in (True, False):
        torch.manual_seed(0)
        model = Normed().double()
        case = Case(later, now=NOW)
        with pipeline(case, model, plan_of((1, 1)), verify="off", safety=HERE) as pipe:
            for batch in batches(3):
                NOW.step = 0 if alike else 1
                pipe.step(batch)
            state = pipe.model_state_dict()
            found.append(state["norm.num_batches_tracked"])
        assert model.seen == 6
    assert found[0] == found[1] == 6
