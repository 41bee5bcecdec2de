"""Modules that keep ranges, random tensors or numbers, and what the ranks that train them do."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import join, normal, plan_of
from torch import nn
from torch.ao import quantization
from torch.nn import functional

from penstock.capture.capture import capture_model

WIDTH, ROWS = 6, 8


class Assigned(nn.Linear):
    """Puts a new tensor in the place of a buffer with every call, as I-BERT's layers do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("low", torch.zeros(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product, and a range that all samples have widened."""
        self.low = torch.minimum(self.low, input.detach().min())
        return super().forward(input)


class Net(nn.Module):
    """Three layers; a module works on the result of the second, which may be the end of a stage."""

    def __init__(self, between: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.first, self.second = Assigned(), nn.Linear(WIDTH, WIDTH)
        self.between, self.last = between(), nn.Linear(WIDTH, 3)
        self.register_buffer("random", torch.randn(WIDTH))
        self.register_buffer("late", torch.randn(3), persistent=False)
        self.plain = torch.randn(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        hidden = torch.relu(self.first(x)) * self.random
        return self.last(self.between(torch.relu(self.second(hidden)))) * self.late + self.plain


class Masked(nn.Module):
    """Leaves out columns that NumPy draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Some columns."""
        return x * torch.from_numpy(np.random.random(WIDTH) < 0.7)


class Weighted(nn.Module):
    """A loss with a random tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.rand(3) + 0.5)

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross entropy of weighted scores."""
        return functional.cross_entropy(scores * self.weights, target)


AVERAGED = quantization.MovingAverageMinMaxObserver
RANGES: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "a range that is only observed": AVERAGED,
    "a histogram": quantization.HistogramObserver,
    "quantisation": lambda: quantization.FakeQuantize(AVERAGED, quant_min=0, quant_max=255),
    "quantisation in one kernel": lambda: quantization.FusedMovingAvgObsFakeQuantize(
        AVERAGED, quant_min=0, quant_max=255
    ),
}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    targets = torch.arange(ROWS) % 3
    return [(normal(ROWS, WIDTH, seed).float(), targets) for seed in range(3)]


def trained(net: nn.Module, loss: Any, data: Any, rows: int) -> list[float]:
    """The losses of plain training, on slices of so many rows one after another."""
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), list[float]()
    for x, y in data:
        optimizer.zero_grad()
        parts = zip(x.split(rows), y.split(rows), strict=True)
        every = [loss(net(a), b) * (rows / ROWS) for a, b in parts]
        sum(every).backward()
        found.append(float(sum(every)))
        optimizer.step()
    return found


def compared_ranges() -> dict[str, str]:
    """What differs from the user's own loop, by case; ranks seed differently."""
    join()
    found: dict[str, str] = {}
    for name, between in RANGES.items():
        torch.manual_seed(dist.get_rank())
        net, loss, data = Net(between), Weighted(), batches()
        graph = capture_model(net, data[0], loss=loss)
        plan = plan_of(len(graph.layer_names), (1, 1), micro_batches=2, rows=ROWS // 2)
        with Pipeline(graph, data[0], plan=plan) as pipe:  # for what the ranks begin with
            pipe.close(gather=True)
        truth, true_loss = copy.deepcopy(net), copy.deepcopy(loss)
        options: Any = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
        with Pipeline(graph, data[0], plan=plan, **options) as pipe:
            losses = [pipe.step(batch).loss for batch in data]
            weights, checked = pipe.model_state_dict(), pipe.verified
        own = trained(truth, true_loss, data, ROWS // 2)
        torch.testing.assert_close(losses, own, rtol=1e-5, atol=0)
        found[name] = "" if checked is not None and checked.compared else str(checked)
        for key, value in truth.state_dict().items() if weights else ():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6, msg=key)
    return found


def masked() -> tuple[str, float]:
    """What is said of the first step of a net that NumPy draws for, and NumPy's next number."""
    join()
    torch.manual_seed(0)
    np.random.seed(0)
    net, data = Net(Masked), batches()
    graph = capture_model(net, data[0], loss=functional.cross_entropy)
    plan = plan_of(len(graph.layer_names), (1, 1), micro_batches=2, rows=ROWS // 2)
    with Pipeline(graph, data[0], plan=plan) as pipe:
        pipe.step(data[0])
        return str(pipe.verified), float(np.random.random())
