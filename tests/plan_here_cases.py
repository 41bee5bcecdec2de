"""Pipelines without a plan, in this process and in workers."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

from penstock import Constraints, Pipeline, Plan

ROWS = 8


def net() -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*parts, nn.Linear(16, 3)).double()


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 16, dtype=torch.float64), torch.arange(rows) % 3


def made(rows: int = ROWS, **options: Any) -> Pipeline:
    options = {"optimizer": AdamW, "loss": functional.cross_entropy} | options
    return Pipeline(net(), batch(rows), **options)


def train_three_times(steps: int) -> list[tuple[list[float], Plan]]:
    """Losses and plan of three starts: the first measures, the last has other constraints."""
    found: list[tuple[list[float], Plan]] = []
    for constraints in (None, None, Constraints(pins=("stages: 2",))):
        with made(constraints=constraints) as pipe:
            found.append(([pipe.step(batch()).loss for _ in range(steps)], pipe.plan))
    return found
