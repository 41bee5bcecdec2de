"""The reference's toys as models, their plans, and the optimizers of the asynchronous tests."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from reference.asynchronous_training import Settings
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from penstock.capture.chain import Chain
from penstock.plan.plan import Plan, Stage
from penstock.plan.row_split import split_rows

WIDTH, ROWS = 3, 4
OPTIMIZERS = {
    "momentum": Settings("sgd", 0.02),
    "nesterov with decay": Settings("sgd", 0.02, nesterov=True, decay=0.1),
    "adam": Settings("adam", 0.02, decay=0.05),
    "adamw": Settings("adamw", 0.02, decay=0.1, shrink=0.97),
}


def first_weights(stages: int, toy: str = "linear") -> list[np.ndarray]:
    generator = np.random.default_rng(stages)
    if toy == "quadratic":
        return list(generator.normal(size=(stages, WIDTH)))
    return list(np.eye(WIDTH) + 0.3 * generator.normal(size=(stages, 2, WIDTH, WIDTH)))


def data(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Micro-batches of inputs and of targets."""
    generator = np.random.default_rng(7)
    return tuple(generator.normal(size=(2, count, ROWS, WIDTH)))


class Shift(nn.Module):
    """``h + w``."""

    def __init__(self, weight: np.ndarray) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(weight.copy()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.weight


class TwoLayers(nn.Module):
    """``(h A) B``, as linear layers have it: the transposes of ``A`` and ``B``."""

    def __init__(self, weight: np.ndarray) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.first.weight.copy_(torch.from_numpy(weight[0].T.copy()))
            self.second.weight.copy_(torch.from_numpy(weight[1].T.copy()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(h))


def chain(weights: list[np.ndarray]) -> Chain:
    """A stage a layer; the loss is half the mean square."""
    return Chain([(Shift if w.ndim == 1 else TwoLayers)(w) for w in weights], half_mean_square)


def as_array(parameters: Sequence[torch.Tensor]) -> np.ndarray:
    """A stage's parameters as the reference has them."""
    found = [p.detach().numpy().T.copy() for p in parameters]
    return found[0] if len(found) == 1 else np.stack(found)


def half_mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * (output - target).square().mean()


def plan_of_stages(
    stages: int, schedule: str, micro_batches: int, *, replicas: int = 1, recompute: bool = False
) -> Plan:
    return Plan(
        tuple(
            Stage(
                # The loss is a layer of its own.
                range(k, k + 1 + (k == stages - 1)),
                tuple(range(k * replicas, (k + 1) * replicas)),
                split_rows(ROWS, (3, 1) if replicas == 2 else (1,)),
                recompute,
            )
            for k in range(stages)
        ),
        micro_batches,
        ROWS,
        schedule,
    )


def make_optimizer(settings: Settings) -> Callable[[list[nn.Parameter]], Optimizer]:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        rate, decay = settings.rate, settings.decay
        if settings.optimizer == "sgd":
            return SGD(
                parameters,
                lr=rate,
                momentum=settings.momentum,
                weight_decay=decay,
                nesterov=settings.nesterov,
            )
        kind = Adam if settings.optimizer == "adam" else AdamW
        return kind(
            parameters, lr=rate, betas=settings.betas, eps=settings.epsilon, weight_decay=decay
        )

    return make


def make_schedule(settings: Settings) -> Callable[[Optimizer], LambdaLR]:
    return lambda optimizer: LambdaLR(optimizer, lambda update: settings.shrink**update)
