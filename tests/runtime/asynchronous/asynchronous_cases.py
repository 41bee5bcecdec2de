"""The reference's toys as models, their plans, and the optimizers of the asynchronous tests."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from reference.asynchronous_training import Settings, train
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from penstock.capture.chain import Chain
from penstock.plan.plan import Plan, Stage
from penstock.plan.row_split import split_rows
from penstock.runtime.asynchronous.weight_versions import WeightVersions
from penstock.runtime.pipeline import Pipeline

TOLERANCE = 1e-12
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


def batches_of(count: int, micro_batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = (
        torch.from_numpy(part).reshape(count, micro_batches * ROWS, WIDTH)
        for part in data(count * micro_batches)
    )
    return list(zip(inputs, targets, strict=True))


def defined(
    method: str, stages: int, settings: Settings, micro_batches: int, **options: Any
) -> list[list[np.ndarray]]:
    """Every weight of each stage by the method's definition, over all micro-batches of a run.

    ``toy`` is that of `first_weights`; other options are those of the reference.
    """
    first = first_weights(stages, options.pop("toy", "linear"))
    size = stages if method in ("2bw", "xpipe") else 1
    return train(method, first, *data(micro_batches), settings, size, **options)


def noting(pipe: Pipeline) -> list[list[np.ndarray]]:
    """The weights of each stage of this process, from now on after every update."""
    found: list[list[np.ndarray]] = []
    for versions in pipe.weight_versions.values():
        noted, update = [as_array(versions.parameters)], versions.update

        def note(
            step: Callable[[], object],
            versions: WeightVersions = versions,
            noted: list[np.ndarray] = noted,
            update: Callable[[Callable[[], object]], None] = update,
        ) -> None:
            update(step)
            noted.append(as_array(versions.parameters))

        found.append(noted)
        versions.update = note
    return found


def assert_equal_histories(found: list[list[np.ndarray]], expected: list[list[np.ndarray]]) -> None:
    assert [len(stage) for stage in found] == [len(stage) for stage in expected]
    for stage, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for update, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            gap = np.abs(a - b).max()
            assert gap <= TOLERANCE * np.abs(b).max(), (stage, update, gap)


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
