"""Ranks that stop, hang or leave the others alone; run in worker processes."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from penstock.capture.chain import Chain
from penstock.plan.plan import Plan, Stage
from penstock.runtime.checkpoints import checkpoint
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline

RANKS = 3


class Hook(nn.Module):
    """Passes its input on; with ``deed``, does that first."""

    deed: str = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        do(self.deed)
        return x


def do(deed: str) -> None:
    if deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "sleep":
        time.sleep(600)


class StopsOneReader:
    """Stops the first process that unpickles it: a worker that has not joined the others yet."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return stop_one, (self.mark,)


def stop_one(mark: Path) -> None:
    """Stop this process if it is the first to come here."""
    with suppress(FileExistsError):
        mark.touch(exist_ok=False)
        do("stop")


def hang(
    where: str,
    deed: str,
    directory: Path,
    timeout_s: float,
    transport: str = "auto",
    _: object = None,
) -> None:
    """Rank 1 stops, sleeps or leaves at a place; the others go on."""
    culprit = os.environ["RANK"] == "1"
    torch.manual_seed(0)
    if where == "before" and culprit:
        do(deed)
    chain = Chain([nn.Sequential(nn.Linear(4, 4), Hook()) for _ in range(RANKS)], loss=nn.MSELoss())
    batch = (torch.randn(8, 4), torch.randn(8, 4))
    stages = tuple(Stage(range(n, n + 1 + (n == RANKS - 1)), (n,), (2,)) for n in range(RANKS))
    plan = Plan(stages, 4, 2, "1f1b")
    with Pipeline(
        chain, batch, plan=plan, timeout_s=timeout_s, safety=Safety(transport=transport)
    ) as pipe:
        pipe.step(batch)
        if where == "step" and culprit:
            Hook.deed = deed
        if where == "checkpoint" and culprit:
            write = checkpoint.write_part
            checkpoint.write_part = lambda *args: (do(deed), write(*args))[1]
        if where == "data" and culprit:
            if deed == "save":
                pipe.save(directory)
            return
        if where == "checkpoint":
            pipe.save(directory)
        pipe.step(batch)
        time.sleep(0.5)
