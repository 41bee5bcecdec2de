"""Weights that get no gradient in a step: for the optimizer it is none, as in torch."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from plain_training import plain_step
from runtime.gradients.idle_cases import CASES, every_problem
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers

CUT = (Stage(range(2), (0,), (3,)), Stage(range(2, 6), (1,), (3,)))


class Routed(nn.Module):
    """Experts that are called if rows are routed to them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, where: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (mine,) = torch.where(where == number)
            if len(mine):
                found = found.index_add(0, mine, expert(x[mine]))
        return functional.cross_entropy(self.head(x + found), y)


def decayed(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.3)


def routed(experts: int) -> Sequence[torch.Tensor]:
    return torch.randn(6, 5), torch.arange(6) % experts, torch.arange(6) % 3


def test_a_stage_may_leave_out_its_own_expert() -> None:
    torch.manual_seed(0)
    model = Routed()
    plain = copy.deepcopy(model)
    optimizer = decayed(plain.parameters())
    batches = [routed(experts) for experts in (3, 2, 3, 2)]
    plan, safety = Plan(CUT, 2, 3, "1f1b"), Safety(transport="in-process")
    with Pipeline(
        capture_model(model, batches[0]), batches[0], plan=plan, optimizer=decayed, safety=safety
    ) as pipe:
        for batch in batches:
            found = pipe.step(batch).loss
            loss = plain_step(optimizer, plain(*batch))
            assert found == pytest.approx(loss, rel=1e-5)
        ours = pipe.model_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_an_expert_whose_result_is_sent_must_run() -> None:
    torch.manual_seed(0)
    batch = routed(3)
    plan, safety = Plan(CUT, 2, 3, "1f1b"), Safety(transport="in-process")
    with Pipeline(
        capture_model(Routed(), batch), batch, plan=plan, optimizer=decayed, safety=safety
    ) as pipe:
        pipe.step(batch)
        with pytest.raises(BadInput, match=r"'index_add' at .* was not made.*in one stage"):
            pipe.step((batch[0], batch[1].clamp(min=1), batch[2]))


def test_weights_without_a_gradient_stay_as_in_the_module_left_whole() -> None:
    for found in launch_workers(every_problem, workers=4, threads=1):
        assert set(CASES) < set(found)
        assert not any(found.values()), found
