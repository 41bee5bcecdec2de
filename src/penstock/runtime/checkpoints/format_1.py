"""Reads checkpoints of format 1, written by torch.distributed.checkpoint with a pickled index.

Reading a pickle can run any code that its writer put there. So this module is imported only if the
user says that a checkpoint can be trusted.
"""

import base64
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.runtime.weights.safetensors_file import StoredTensor

__all__ = ["loader_place_with_pickle", "read_pickled", "stored_with_pickle"]


def stored_with_pickle(path: Path) -> dict[str, StoredTensor]:
    """Type and shape of every tensor of a checkpoint, by name. Can run code of its writer."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: StoredTensor(path, name, entry.properties.dtype, tuple(entry.size), 0)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_pickled(
    path: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    """Fill ``tensors`` in place; all ranks must call this, each with its own tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(
            dict(tensors),
            checkpoint_id=path,
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def loader_place_with_pickle(text: str) -> Any:
    """The state of a loader, which ``state.json`` holds as text."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
