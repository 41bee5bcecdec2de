"""What the worker processes of the tests of resuming run; they import no more than they need."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.checkpoints.loader_state import ResumableLoader
from penstock.runtime.options import Update


def join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def whole_weights(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """The model's weights on every rank."""
    box: list[Any] = [pipe.model_state_dict()]
    if dist.is_initialized():
        dist.broadcast_object_list(box, 0)
    return box[0]


def classes(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (rows,), generator=generator)


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Adds noise from the global generator: ranks agree on it only if nothing else draws there."""

    def __init__(self) -> None:
        self.x, self.y = (torch.cat([part] * 2) for part in classes(30, seed=5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(6, dtype=torch.float64), self.y[index]


def net() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.BatchNorm1d(16), nn.Linear(16, 3)).double()


def net_plan(layers: int) -> Plan:
    """Two stages; the first on two ranks, which draw different masks for their rows."""
    return Plan(
        (Stage(range(1), (0, 1), (2, 2)), Stage(range(1, layers), (2,), (4,))), 2, 4, "1f1b"
    )


def train_net(
    directory: Path, *, epochs: int = 2, die_after: int = 0, resume: bool = False, seed: int = 1
) -> dict[str, Any]:
    """Weights and losses of a run with dropout, noise, a shuffling loader and a schedule.

    It evaluates now and then, which must not move any random number.
    """
    join()
    model = net()
    graph = capture_model(model, classes(4), loss=functional.cross_entropy)
    generator = torch.Generator().manual_seed(11)
    loader = ResumableLoader(DataLoader(Noisy(), 8, shuffle=True, generator=generator))
    losses: list[float] = []
    with Pipeline(
        graph,
        classes(8),
        plan=net_plan(len(graph.layer_names)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        learning_rate_schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, 24
        ),
        update=Update(seed=seed),
        timeout_s=60,
    ) as pipe:
        torch.manual_seed(17)
        if resume:
            # Whatever was drawn since the start must not matter.
            torch.rand(5)
            pipe.load(directory, loader=loader)
        for _ in range(loader.epoch, epochs):
            for batch in loader:
                losses.append(pipe.step(batch).loss)
                if pipe.steps == die_after - 2 or (die_after == 0 and pipe.steps % 5 == 0):
                    pipe.evaluate(classes(5))
                if die_after and pipe.steps == die_after - 1:
                    pipe.save(directory, loader=loader, extra={"note": "midway"})
                if pipe.steps == die_after:
                    os.kill(os.getpid(), signal.SIGKILL)
        return {"losses": losses, "weights": whole_weights(pipe), "steps": pipe.steps}


def train_twice() -> list[list[float]]:
    """Losses of two runs with one seed, and of one with another."""
    join()
    here = Path()
    return [train_net(here, epochs=1, seed=seed)["losses"] for seed in (1, 1, 2)]


def train_net_with(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """`train_net` as the launcher can call it."""
    return train_net(directory, **options)
