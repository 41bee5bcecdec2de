"""A mode of torch's functions that the user has entered, around capture and training."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline


class Passing(TorchFunctionMode):
    """Passes every call on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Doubling(Passing):
    """Makes another call of one: two times the sine instead of the sine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return doubled(result) if func is torch.sin else result


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Between(nn.Module):
    """Calls functions between its modules, at which it may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(self.first(x)) + x)


@pytest.mark.parametrize("mode", [Passing, Doubling])
def test_stages_see_the_calls_that_were_recorded_under_it(mode: type[Passing]) -> None:
    torch.manual_seed(0)
    model, batch = Between(), (torch.randn(4, 3), torch.randn(4, 3))
    safety = Safety(transport="in-process")
    with mode():
        expected = nn.functional.mse_loss(model(batch[0]), batch[1]).item()
        graph = capture_model(model, batch, loss=nn.functional.mse_loss)
        layers = len(graph.layer_names)
        for cut in range(1, layers):
            stages = (Stage(range(cut), (0,), (2,)), Stage(range(cut, layers), (1,), (2,)))
            plan = Plan(stages, 2, 2, "1f1b")
            with Pipeline(graph, batch, plan=plan, safety=safety, verify="off") as pipe:
                assert pipe.step(batch).loss == pytest.approx(expected, rel=1e-5)
                assert pipe.evaluate(batch).loss == pytest.approx(expected, rel=1e-5)
