"""Pipelines without a plan, in this process and in workers."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

from penstock import Constraints, Pipeline, Plan, Stage

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


def whole() -> Plan:
    """All five layers on one rank."""
    return Plan((Stage(range(5), (0,), (4,)),), 2, 4, "1f1b")


def two_stages(layers: int) -> Plan:
    """The last layer is on a rank of its own."""
    stages = Stage(range(layers - 1), (0,), (4,)), Stage(range(layers - 1, layers), (1,), (4,))
    return Plan(stages, 2, 4, "1f1b")


def train_three_times(steps: int) -> list[tuple[list[float], Plan]]:
    """Losses and plan of three starts: the first measures, the last has other constraints."""
    found: list[tuple[list[float], Plan]] = []
    for constraints in (None, None, Constraints(pins=("stages: 2",))):
        with made(constraints=constraints) as pipe:
            found.append(([pipe.step(batch()).loss for _ in range(steps)], pipe.plan))
    return found


TWO, ONE = Constraints(pins=("stages: 2",)), Constraints(pins=("stages: 1",))


def find_other_plan(asked: Constraints, other: Constraints) -> None:
    """Make the next start that asks for ``asked`` find what was found for ``other``."""
    (file,) = Path(os.environ["PENSTOCK_CACHE"]).iterdir()
    kept = json.loads(file.read_text())
    kept["plans"][asked.text] = kept["plans"][other.text]
    file.write_text(json.dumps(kept))


def train_and_resume(folder: Path) -> dict[str, tuple[int, list[float]]]:
    """The number of stages, and losses, of a run and of others that go on from its checkpoint."""
    found: dict[str, tuple[int, list[float]]] = {}

    def train(name: str, constraints: Constraints, **options: Any) -> None:
        with made(constraints=constraints, **options) as pipe:
            if name != "whole":
                pipe.load(folder)
            losses = [pipe.step(batch()).loss for _ in range(2)]
            if name == "whole":
                pipe.save(folder)
                losses = [pipe.step(batch()).loss for _ in range(2)]
            found[name] = len(pipe.plan.stages), losses

    train("whole", TWO)
    train("other constraints", ONE)
    if os.environ["RANK"] == "0":
        find_other_plan(TWO, ONE)
    train("resumed", TWO)
    return found
