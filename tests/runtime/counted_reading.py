"""Trainings on real files whose reads are counted, as the worker processes run them."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipelines_of_any_plan import Pipeline
from runtime.part_cases import adam, join, seeded
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.checkpoints.loader_state import ResumableLoader

SAMPLES, BATCH, WIDTH, CLASSES = 40, 8, 10, 4
INPUT_BYTES, TARGET_BYTES = 8 * WIDTH, 8
REPLICATED = ((0, 1), (2,), (3,))


class CountedFile:
    """A file of rows of equal size; every byte that is read of it is counted."""

    def __init__(self, path: Path, dtype: Any, width: int) -> None:
        self._path = path
        self._dtype, self._width = np.dtype(dtype), width
        self.bytes, self.rows = 0, list[int]()

    def __getitem__(self, rows: Sequence[int]) -> torch.Tensor:
        file = os.open(self._path, os.O_RDONLY)
        found = [self._row(file, row) for row in rows]
        os.close(file)
        self.rows += rows
        return torch.from_numpy(np.stack(found)).squeeze(1)

    def _row(self, file: int, row: int) -> Any:
        size = self._dtype.itemsize * self._width
        data = os.pread(file, size, row * size)
        self.bytes += len(data)
        return np.frombuffer(data, self._dtype)


def write_files(directory: Path) -> None:
    """Inputs and targets, each in a file of its own."""
    source = np.random.default_rng(0)
    source.standard_normal((SAMPLES, WIDTH)).tofile(directory / "inputs")
    source.integers(0, CLASSES, SAMPLES).tofile(directory / "targets")


def columns_in(directory: Path) -> dict[int, CountedFile]:
    return {
        0: CountedFile(directory / "inputs", "float64", WIDTH),
        1: CountedFile(directory / "targets", "int64", 1),
    }


def layers() -> nn.Module:
    parts = [nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, CLASSES)]
    return nn.Sequential(*parts)


def loader_of(
    collate: Any, samples: int = SAMPLES, batch: int = BATCH, workers: int = 0
) -> ResumableLoader:
    """Shuffled batches of the numbers of samples; the last of a pass is as large as the others."""
    numbers: Any = range(samples)
    generator = torch.Generator().manual_seed(3)
    options: Any = {"shuffle": True, "collate_fn": collate, "num_workers": workers}
    return ResumableLoader(DataLoader(numbers, batch, generator=generator, **options))


def all_columns(columns: dict[int, CountedFile], indices: Sequence[int]) -> tuple[Any, ...]:
    """The whole batch: what every rank reads otherwise."""
    return columns[0][indices], columns[1][indices]


def plan_of(devices: Sequence[Sequence[int]], count: int) -> Plan:
    """Stages on these ranks; replicas of the first compute 1 and 3 rows of a micro-batch of 4."""
    ends = [count * (n + 1) // len(devices) for n in range(len(devices))]
    stages = tuple(
        Stage(range(lo, hi), tuple(own), (1, 3) if len(own) == 2 else (4,))
        for lo, hi, own in zip([0, *ends], ends, devices, strict=False)
    )
    return Plan(stages, 2, 4, "1f1b")


def trained(
    directory: Path,
    devices: Sequence[Sequence[int]],
    *,
    parts: bool,
    epochs: int = 2,
    resume: Path | None = None,
    stop_after: int = 0,
    workers: int = 0,
) -> dict[str, Any]:
    """Losses of a training, the bytes and rows that this rank read, and its weights."""
    join()
    example = torch.zeros(BATCH, WIDTH, dtype=torch.float64), torch.zeros(BATCH, dtype=torch.int64)
    graph = capture_model(seeded(layers), example, loss=functional.cross_entropy)
    plan, columns = plan_of(devices, len(graph.layer_names)), columns_in(directory)
    losses: list[float] = []
    with Pipeline(graph, example, plan=plan, optimizer=adam) as pipe:
        read = partial(pipe.needs.read, columns) if parts else partial(all_columns, columns)
        loader = loader_of(read, workers=workers)
        if resume is not None and not stop_after:
            pipe.load(resume, loader=loader)
        for _ in range(loader.epoch, epochs):
            for batch in loader:
                losses.append(pipe.step(batch).loss)
                if stop_after == pipe.steps and resume is not None:
                    pipe.save(resume, loader=loader)
                    break
            if stop_after == pipe.steps:
                break
        return {
            "losses": losses,
            "bytes": {name: column.bytes for name, column in columns.items()},
            "rows": {name: column.rows for name, column in columns.items()},
            "weights": {name: p.detach().clone() for name, p in pipe.named_parameters()},
        }


def every_way(directory: Path) -> dict[str, Any]:
    """Trainings on four ranks: one stage on each, and two replicas of the first."""
    alone, both = ((0,), (1,), (2,), (3,)), REPLICATED
    checkpoints = directory / "checkpoints"
    return {
        "whole": trained(directory, alone, parts=False),
        "parts": trained(directory, alone, parts=True),
        "whole, replicas": trained(directory, both, parts=False),
        "parts, replicas": trained(directory, both, parts=True),
        "loader processes": trained(directory, both, parts=True, workers=1),
        "until stopped": trained(directory, both, parts=True, resume=checkpoints, stop_after=7),
        "resumed": trained(directory, both, parts=True, resume=checkpoints),
    }
