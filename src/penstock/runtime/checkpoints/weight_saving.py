"""Writes weights in the layout of Hugging Face; each rank writes the tensors that it owns."""

import copy
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.runtime.checkpoints.writer import commit, make_durable
from penstock.runtime.engine import Engine
from penstock.runtime.weights.directory import INDEX_FILE, SINGLE_FILE, shard_name
from penstock.runtime.weights.safetensors_file import write_tensors

__all__ = ["begin", "cannot_write", "check_free", "rename", "save_weights", "whole_state_dict"]


def check_free(directory: Path) -> None:
    """Raise `BadInput` if weights would be overwritten or the path is a file."""
    if directory.exists() and not directory.is_dir():
        raise BadInput(f"weights cannot be saved in '{directory}', which is a file; name another")
    if directory.is_dir() and any(directory.glob("*.safetensors*")):
        raise BadInput(
            f"'{directory}' holds weights already, which are not overwritten; name another "
            f"directory, or delete them"
        )


def save_weights(engine: Engine, directory: Path, max_shard_bytes: int) -> None:
    """Write the model's tensors; see `Pipeline.save_pretrained`.

    They are written to a temporary folder first. Files are then moved into an existing directory
    with the index last, so that it never looks complete before it is.
    """
    world = engine.world
    part = directory.with_name(f".{directory.name}.partial")
    if max_shard_bytes < 1:
        raise BadInput(f"max_shard_bytes is {max_shard_bytes}; it must be >= 1")
    world.done_by_first(partial(begin, directory, part))
    own = split(saved_tensors(engine), max_shard_bytes)
    counts = world.gather(len(own))
    before, count = sum(counts[: world.rank]), sum(counts)
    names = [shard_name(before + n, count) for n in range(1, len(own) + 1)]
    if count == 1:
        names = [SINGLE_FILE] * len(own)
    world.agreed(lambda: write_shards(part, dict(zip(names, own, strict=True))))
    index = {name: file for file, held in zip(names, own, strict=True) for name in held}
    size = sum(tensor.nbytes for held in own for tensor in held.values())
    parts = world.gather((index, size))
    world.done_by_first(partial(finish, engine.graph, directory, part, parts))


def begin(directory: Path, part: Path) -> None:
    """Create the temporary folder."""
    check_free(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if part.exists():
            shutil.rmtree(part)
        part.mkdir()
    except OSError as cause:
        raise cannot_write(directory, cause) from cause


def saved_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """What this rank writes: the persistent tensors that it owns, tied ones once."""
    graph, own = engine.graph, engine.held.owned_tensors()
    names: dict[str, list[str]] = {}
    for name in graph.model.state_dict():
        names.setdefault(graph.tied_names.get(name, name), []).append(name)
    return {main_name(graph.model, names[n]): t for n, t in own.items() if n in names}


def whole_state_dict(engine: Engine) -> dict[str, torch.Tensor]:
    """All weights and buffers by all their names, on rank 0; see `Pipeline.model_state_dict`."""
    own = engine.held.owned_tensors()
    parts = engine.world.gather_to_first({name: t.detach().cpu() for name, t in own.items()})
    whole = {name: tensor for part in parts for name, tensor in part.items()}
    tied = {other: whole[name] for other, name in engine.graph.tied_names.items() if whole}
    return whole | tied


def main_name(model: nn.Module, names: Sequence[str]) -> str:
    """Choose among the names of a tied tensor the one that the model's class does not call tied."""
    tied = list(getattr(model, "_tied_weights_keys", None) or ())
    return next((n for n in names if not any(re.search(t, n) for t in tied)), names[0])


def split(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """Divide ``tensors`` into files of at most ``limit`` bytes; larger ones get their own file."""
    files: list[dict[str, torch.Tensor]] = []
    left = 0
    for name, tensor in tensors.items():
        if not files or tensor.nbytes > left:
            files.append({})
            left = limit
        files[-1][name] = tensor
        left -= tensor.nbytes
    return files


def write_shards(part: Path, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write this rank's files."""
    try:
        for name, tensors in files.items():
            write_tensors(part / name, tensors)
    except OSError as cause:
        raise cannot_write(part, cause) from cause


def finish(
    graph: LayerGraph,
    directory: Path,
    part: Path,
    parts: Sequence[tuple[Mapping[str, str], int]],
) -> None:
    """Write index and configuration, and give the folder its final name."""
    places = {name: file for index, _ in parts for name, file in index.items()}
    try:
        if SINGLE_FILE not in places.values():
            index = {"metadata": {"total_size": sum(size for _, size in parts)}}
            (part / INDEX_FILE).write_text(json.dumps(index | {"weight_map": places}, indent=2))
        save_configuration(graph.model, part)
    except OSError as cause:
        raise cannot_write(directory, cause) from cause
    rename(part, directory, last=INDEX_FILE)


def rename(part: Path, directory: Path, last: str) -> None:
    """Rename ``part`` to ``directory``, or move its files there if that exists, ``last`` last."""
    try:
        if not directory.exists():
            commit(part, directory)
            return
        make_durable(part)
        for path in sorted(part.iterdir(), key=lambda path: path.name == last):
            os.replace(path, directory / path.name)
        part.rmdir()
    except OSError as cause:
        raise cannot_write(directory, cause) from cause


def save_configuration(model: nn.Module, directory: Path) -> None:
    """Write ``config.json`` and the generation's configuration, if the model has them."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if not hasattr(config, "save_pretrained"):
        return
    types = [p.dtype for p in model.parameters() if p.is_floating_point()]
    config.architectures = [type(model).__name__]
    config.dtype = str(types[0]).removeprefix("torch.") if types else None
    config.save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(directory)


def cannot_write(directory: Path, cause: OSError) -> BadInput:
    """The error for weights that cannot be written to disk."""
    return BadInput(f"weights cannot be written to '{directory}' ({cause}); name another directory")
