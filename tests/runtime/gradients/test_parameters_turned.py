"""A forward that turns its own parameters into another type, as routers of transformers do."""

import pytest
import torch
from plain_training import plain_step
from torch import nn

from penstock.capture.capture import capture_model
from penstock.errors import BadInput, RunFailed
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline


class Router(nn.Module):
    """Chooses in float32, whatever type the model has; a unit, since it calls no module."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classifier = self.classifier.to(torch.float32)
        chosen = nn.functional.linear(x.float(), self.classifier.weight)
        return x * chosen.softmax(-1).to(x.dtype)


def losses(model: nn.Module) -> list[float]:
    """Those of two steps, which change the weights, of two stages in this process."""
    batch = torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    graph = capture_model(model, batch, loss=nn.functional.mse_loss)
    layers = len(graph.layer_names)
    stages = Stage(range(1), (0,), (2,)), Stage(range(1, layers), (1,), (2,))
    plan = Plan(stages, 2, 2, "1f1b")
    safety = Safety(transport="in-process")
    with Pipeline(graph, batch, plan=plan, optimizer=sgd, safety=safety, verify="off") as pipe:
        return [pipe.step(batch).loss for _ in range(2)]


def sgd(parameters: object) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, 0.5)  # type: ignore[arg-type]


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Router(), nn.Linear(4, 4)).double()


def test_its_gradient_would_not_count_as_others_do_and_the_step_is_refused() -> None:
    with pytest.raises((BadInput, RunFailed), match=r"'1\.classifier\.weight' from torch\.float64"):
        losses(made())


def test_turned_before_it_trains_as_one_process_does() -> None:
    ours, plain = made(), made()
    ours.get_submodule("1.classifier").float()
    optimizer, x = sgd(plain.parameters()), torch.ones(4, 4, dtype=torch.float64)
    expected: list[float] = []
    for _ in range(2):
        expected.append(
            plain_step(optimizer, nn.functional.mse_loss(plain(x), torch.zeros_like(x)))
        )
    assert losses(ours) == pytest.approx(expected, rel=1e-6)
