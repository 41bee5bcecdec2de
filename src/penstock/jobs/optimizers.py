"""Makes optimizers and learning-rate schedules from a job's settings."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from penstock.jobs.job import OptimizerSettings
from penstock.jobs.muon import MuonWithAdamW

__all__ = ["learning_rate_schedule", "optimizer_factory"]

LEAST_SHARE = 0.1
"""The fraction of the learning rate at the end of a cosine schedule."""


def optimizer_factory(
    settings: OptimizerSettings,
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A function that makes the optimizer; each rank calls it with its own parameters."""

    rate, decay = settings.learning_rate, settings.weight_decay
    flags = {"fused": settings.fused, "foreach": settings.foreach}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        match settings.name:
            case "adamw":
                return torch.optim.AdamW(
                    parameters, lr=rate, betas=settings.betas, weight_decay=decay, **flags
                )
            case "adam":
                return torch.optim.Adam(
                    parameters, lr=rate, betas=settings.betas, weight_decay=decay, **flags
                )
            case "sgd":
                return torch.optim.SGD(
                    parameters, lr=rate, momentum=settings.momentum, weight_decay=decay, **flags
                )
            case "muon":
                return MuonWithAdamW(
                    parameters,
                    learning_rate=rate,
                    weight_decay=decay,
                    momentum=settings.momentum,
                    betas=settings.betas,
                    **flags,
                )

    return make


def learning_rate_schedule(
    settings: OptimizerSettings, steps: int, updates_per_step: int = 1
) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """A function that makes the learning-rate schedule over ``steps`` steps.

    If weights are updated several times in a step, all its updates have the same rate.

    share(k) = min(1, (k + 1) / warm_up_steps) * decay(k),
    decay(k) = 0.1 + 0.45 (1 + cos(pi * k / steps))    or 1 if the rate is constant
    """

    def share(step: int) -> float:
        warm_up = min(1.0, (step + 1) / max(1, settings.warm_up_steps))
        if settings.schedule == "constant":
            return warm_up
        wave = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return warm_up * (LEAST_SHARE + (1 - LEAST_SHARE) * wave)

    return lambda optimizer: LambdaLR(optimizer, lambda update: share(update // updates_per_step))
