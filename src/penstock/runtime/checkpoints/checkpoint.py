"""Checkpoints that any plan can read: tensors by the model's own names, written atomically.

A checkpoint is a directory ``step-00000100`` of torch.distributed.checkpoint files, to which every
rank contributes the tensors it owns, and ``state.json`` for what is not a tensor. It is written
under another name first and renamed when complete, so a directory of that name is always whole.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.errors import BadInput

__all__ = [
    "latest_checkpoint",
    "load_checkpoint",
    "make_durable",
    "read_state",
    "save_checkpoint",
    "stored_tensors",
]

STATE_FILE = "state.json"
SCHEMA = 1


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write ``directory/step-<step>``, then delete all but the newest ``keep``; every rank calls.

    ``tensors`` are those this rank writes; a name that several ranks give is written once.
    ``state`` (rank 0's counts) must be JSON. Returns the path of the checkpoint.

    Raises:
        BadInput: the directory cannot be written.
    """
    final = directory / f"step-{step:08d}"
    partial = directory / f".step-{step:08d}.partial"
    first = not dist.is_initialized() or dist.get_rank(group) == 0
    problem = ""
    if first:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for left_over in directory.glob(".step-*.partial"):
                shutil.rmtree(left_over)
            partial.mkdir()
        except OSError as cause:
            problem = (
                f"checkpoint directory '{directory}' cannot be written ({cause}); name another"
            )
    raise_on_all(problem, group)
    with alone_without_warning():
        save(
            dict(tensors),
            checkpoint_id=partial,
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    if first:
        text = json.dumps({"schema": SCHEMA, "step": step, **state}, indent=1)
        (partial / STATE_FILE).write_text(text)
        make_durable(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        synchronise(directory)
        for outdated in checkpoints_in(directory)[:-keep]:
            shutil.rmtree(outdated)
    raise_on_all("", group)
    return final


def load_checkpoint(
    path: Path, tensors: Mapping[str, torch.Tensor], *, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Fill ``tensors`` in place from a checkpoint of any plan; every rank calls with its own.

    Returns what was saved as ``state``.

    Raises:
        BadInput: not a checkpoint, or a tensor is missing or of another shape.
    """
    problem, state = "", {}
    try:
        state = read_state(path)
        problem = first_mismatch(path, tensors)
    except BadInput as cause:
        problem = str(cause)
    raise_on_all(problem, group)
    with alone_without_warning():
        load(
            dict(tensors),
            checkpoint_id=path,
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    return state


@contextmanager
def alone_without_warning() -> Iterator[None]:
    """Without the warning that there is only one process, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def stored_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor in a checkpoint, by name."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def first_mismatch(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """What prevents loading ``tensors``; empty if nothing does."""
    stored = stored_tensors(path)
    for name, tensor in tensors.items():
        if name not in stored:
            return (
                f"checkpoint '{path}' has no tensor '{name}'; it was written by another model or "
                f"another optimizer; start without it"
            )
        size, _ = stored[name]
        if size != tuple(tensor.shape):
            return (
                f"tensor '{name}' has shape {size} in checkpoint '{path}' and "
                f"{tuple(tensor.shape)} in the model; build the model as it was when saved"
            )
    return ""


def raise_on_all(problem: str, group: dist.ProcessGroup | None) -> None:
    """Raise `BadInput` on every rank if one has a problem, so that none waits for another."""
    problems: list[Any] = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    for text in problems:
        if text:
            raise BadInput(text)


def read_state(path: Path) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors, with its ``step``.

    Raises:
        BadInput: the path is not a complete checkpoint of this schema.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text())
    except (OSError, ValueError) as cause:
        raise BadInput(
            f"'{path}' is not a complete checkpoint ({cause}); name a directory step-<number>"
        ) from cause
    if state.get("schema") != SCHEMA:
        raise BadInput(
            f"checkpoint '{path}' has schema {state.get('schema')}, this version reads {SCHEMA}; "
            f"read it with the version that wrote it"
        )
    return state


def latest_checkpoint(directory: Path) -> Path:
    """The newest complete checkpoint in ``directory``.

    Raises:
        BadInput: there is none.
    """
    found = checkpoints_in(directory)
    if not found:
        raise BadInput(f"no checkpoint in '{directory}'; name the directory of a run with one")
    return found[-1]


def checkpoints_in(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("step-*") if (path / STATE_FILE).is_file())


def make_durable(directory: Path) -> None:
    """Put every file of ``directory`` on disk before its new name says that it is whole."""
    for path in directory.iterdir():
        synchronise(path)
    synchronise(directory)


def synchronise(path: Path) -> None:
    """Flush one file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
