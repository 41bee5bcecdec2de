"""Read and write files in the safetensors format.

The package of that name reads them: not mapped, since a map of a whole file counts against a
process's data limit. It would write tensors only if all of a file are in host memory. A file has
the length of its header in 8 bytes, the header in JSON, and the tensors' bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.device import pieces_on_host
from penstock.errors import BadInput

ALIGNMENT_BYTES = 8

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
    """All tensors of a file, by name, without reading their values."""
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
    """Fill tensors of the same shapes, one after another; their devices and types are kept."""
    for path in dict.fromkeys(stored.file for stored, _ in targets):
        with opened(path) as file:
            for stored, target in targets:
                if stored.file == path:
                    target.copy_(file.get_tensor(stored.name))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file, piece by piece: of tensors on a GPU little is in host memory at once."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The widest types first, so that all are aligned.
    ordered = sorted(tensors.items(), key=lambda named: (-named[1].dtype.itemsize, named[0]))
    for name, tensor in ordered:
        if tensor.dtype not in names:
            raise BadInput(
                f"tensor '{name}' has type {tensor.dtype}, which is not saved; "
                f"use one of {', '.join(map(str, names))}"
            )
        start, end = end, end + tensor.nbytes
        entry = {"dtype": names[tensor.dtype], "shape": tuple(tensor.shape)}
        header[name] = {**entry, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for piece in pieces_on_host(tensor):
                file.write(piece.numpy().data)
