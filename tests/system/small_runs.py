"""Runs of the small job of `training_jobs`, and what they record."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from training_jobs import job_file

from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan, Stage
from penstock.train.job_file import find_job
from penstock.train.train import TrainRequest, TrainResult, train_job

TWO_STAGES = Plan((Stage(range(0, 2), (0,), (4,)), Stage(range(2, 4), (1,), (4,))), 4, 4, "1f1b")


def train(
    folder: Path,
    plan: Plan | None = TWO_STAGES,
    costs: Path | None = None,
    *,
    workers: int = 2,
    out: str = "run",
    resume: bool = False,
    shown: bool = False,
    request: dict[str, Any] | None = None,
    changes: Sequence[str] = (),
    **settings: Any,
) -> TrainResult:
    """Train the job in ``folder`` by a plan, or by one that is made; with the costs of a run.

    ``changes`` are as ``--set`` takes them.
    """
    folder.mkdir(exist_ok=True)
    directory = folder / out
    if costs is not None and not resume:
        directory.mkdir()
        shutil.copy(costs / "profile.json", directory)
        shutil.copy(costs / "cluster.toml", directory)
    given = None if plan is None else folder / "given.json"
    if given is not None:
        write_plan(plan, given)
    asked = TrainRequest(
        workers=workers, plan=given, out=directory, resume=resume, shown=shown, **(request or {})
    )
    return train_job(find_job(job_file(folder, **settings), changes), asked)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """All records of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """The training loss of each step."""
    return {row["step"]: row["loss"] for row in rows_of(run) if "loss" in row}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder of safetensors."""
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}
