"""Reads and writes files in the safetensors format, through the package of that name.

Files are read and not mapped, since a map of a whole file counts against a process's data limit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from penstock.errors import BadInput

__all__ = ["StoredTensor", "read_header", "read_into", "write_tensors"]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file, by name, without reading their values.

    Raises:
        BadInput: the file is missing, incomplete, or not of this format.
    """
    found: dict[str, StoredTensor] = {}
    with opened(path) as file:
        for name in file.offset_keys():
            stored = file.get_slice(name)
            kind = stored.get_dtype()
            if kind not in DTYPES:
                raise BadInput(f"tensor '{name}' of '{path}' has type {kind}, which is not trained")
            found[name] = StoredTensor(path, name, DTYPES[kind], tuple(stored.get_shape()))
    return found


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of tensors, with errors in a line."""
    try:
        with safe_open(path, "pt", backend="pread") as file:
            yield file
    except OSError as cause:
        why = cause.strerror or cause
        raise BadInput(f"weights '{path}' cannot be read: {why}; copy them again") from cause
    except SafetensorError as cause:
        raise BadInput(
            f"'{path}' is not a whole safetensors file ({cause}); copy or download it again"
        ) from cause


@torch.no_grad()
def read_into(targets: Sequence[tuple[StoredTensor, torch.Tensor]]) -> None:
    """Fill tensors of the same shapes, one after another; their devices and types are kept.

    Raises:
        BadInput: a file cannot be read, or has become shorter.
    """
    for path in dict.fromkeys(stored.file for stored, _ in targets):
        with opened(path) as file:
            for stored, target in targets:
                if stored.file == path:
                    target.copy_(file.get_tensor(stored.name))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file, without copying tensors that are contiguous and on the CPU.

    Raises:
        OSError: the file cannot be written.
        BadInput: the format does not support the type of a tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise BadInput(
                f"tensor '{name}' has type {tensor.dtype}, which is not saved; "
                f"use one of {', '.join(str(dtype) for dtype in DTYPES.values())}"
            )
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in held.items()
    }
    # The package writes a file that only its owner may read, and gives it the name of this one.
    path.touch()
    mode = path.stat().st_mode
    try:
        serialize_file(specs, path, {"format": "pt"})
    except SafetensorError as cause:
        raise OSError(str(cause)) from cause
    path.chmod(mode)
