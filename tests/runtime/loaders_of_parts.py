"""Parts of batches from the loaders and files that people have, as worker processes read them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipelines_of_any_plan import Pipeline
from runtime import counted_reading
from runtime.part_cases import Skipping, adam, cut, join, loss_of, rows_of, seeded
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import BatchSampler, RandomSampler
from transformers import default_data_collator

from penstock.capture.batch.part import BatchPart
from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan

SAMPLES, BATCH = 32, 8


def write_data(directory: Path) -> None:
    """The same samples as a safetensors file and as one NumPy file for each tensor."""
    data = rows_of(0, SAMPLES)
    save_file(data, directory / "data.safetensors")
    for name, tensor in data.items():
        np.save(directory / f"{name}.npy", tensor.numpy())


class Features:
    """Samples as the data sets of Hugging Face give them; counts the entries that are taken."""

    def __init__(self) -> None:
        self._data = rows_of(0, SAMPLES)
        self.taken = dict.fromkeys(self._data, 0)

    def feature(self, index: int, keys: Sequence[str]) -> dict[str, Any]:
        for key in keys:
            self.taken[key] += 1
        return {key: self._data[key][index] for key in keys}


def collated(features: Features, key: str, rows: list[int]) -> torch.Tensor:
    """One tensor of a batch, by a collator that takes features."""
    return default_data_collator([features.feature(row, [key]) for row in rows])[key]


def from_safetensors(path: Path, key: str, rows: list[int]) -> torch.Tensor:
    """Rows of a tensor in a file; no other rows are read."""
    with safe_open(path, "pt") as file:
        whole = file.get_slice(key)
        return torch.cat([whole[row : row + 1] for row in rows])


def columns_of(kind: str, directory: Path, features: Features) -> dict[str, Any]:
    keys = ("x", "skip", "labels")
    if kind == "NumPy":
        return {key: np.load(directory / f"{key}.npy", mmap_mode="r") for key in keys}
    if kind == "safetensors":
        file = directory / "data.safetensors"
        return {key: partial(from_safetensors, file, key) for key in keys}
    return {key: partial(collated, features, key) for key in keys}


class PlainLoader:
    """A sampler of batches, with no loader of torch around it."""

    def __init__(self, pipe: Pipeline, *, whole: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self._batches = BatchSampler(
            RandomSampler(range(SAMPLES), generator=generator), BATCH, drop_last=False
        )
        self._pipe, self._data, self._whole = pipe, rows_of(0, SAMPLES), whole

    def __iter__(self) -> Any:
        needs = self._pipe.needs
        for number, indices in enumerate(self._batches):
            if self._whole:
                yield {key: leaf[indices] for key, leaf in self._data.items()}
                continue
            rows = {key: needs.pick(key, indices) for key in needs.keys}
            leaves = {key: self._data[str(key)][rows[key]] for key in rows}
            yield BatchPart(number, len(indices), leaves, indices=indices)


def loader_of(kind: str, directory: Path, features: Features, pipe: Pipeline) -> Any:
    if "sampler" in kind:
        return PlainLoader(pipe, whole=kind == "everything, sampler")
    data = rows_of(0, SAMPLES)
    read: Any = lambda indices: {key: leaf[indices] for key, leaf in data.items()}  # noqa: E731
    if kind != "everything":
        read = partial(pipe.needs.read, columns_of(kind, directory, features))
    return counted_reading.loader_of(read, SAMPLES, BATCH)


def losses(directory: Path) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The losses with each kind of loader, and the entries taken for the collator."""
    join()
    found: dict[str, list[float]] = {}
    features = Features()
    for kind in (
        "everything",
        "NumPy",
        "safetensors",
        "collator",
        "sampler",
        "everything, sampler",
    ):
        graph = capture_model(seeded(Skipping), rows_of(0, 4), loss=loss_of, granularity="operator")
        stages = cut(len(graph.layer_names), (0,), (1,), (2,), slices=((4,),) * 3)
        plan = Plan(stages, 2, 4, "1f1b")
        with Pipeline(graph, rows_of(0, 8), plan=plan, optimizer=adam) as pipe:
            loader = loader_of(kind, directory, features, pipe)
            found[kind] = [pipe.step(batch).loss for _ in range(2) for batch in loader]
    return found, features.taken
