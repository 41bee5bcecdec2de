"""Reads and writes files in the safetensors format, one tensor at a time.

    8 bytes: length n of the header    n bytes: JSON    the tensors' bytes, one after another

The header gives for every name ``{"dtype": ..., "shape": ..., "data_offsets": [begin, end]}``
(https://huggingface.co/docs/safetensors). The package of that name maps a whole file as writable,
so that all its bytes count against a process's data limit, and it copies all tensors that it
writes. This module holds only one tensor at a time.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.errors import BadInput

__all__ = [
    "DTYPES",
    "StoredTensor",
    "bytes_of",
    "plain_bytes",
    "read_header",
    "read_into",
    "write_tensors",
]

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

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading a header raises that is not as it should be."""

LARGEST_HEADER = 100_000_000
"""The largest header in bytes, as in the format's own readers."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its bytes begin at offset ``begin`` of ``file``."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def bytes_of(tensor: torch.Tensor) -> int:
    """The size of a tensor's values in bytes."""
    return tensor.numel() * tensor.element_size()


def plain_bytes(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU as an array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file, by name, without reading their values.

    Raises:
        BadInput: the file is missing, incomplete, or not of this format.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= LARGEST_HEADER:
                raise ValueError(f"its header would have {length} bytes")
            entries = json.loads(file.read(length))
        data, size = 8 + length, path.stat().st_size
        tensors = {
            name: stored_tensor(path, name, entry, data)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
        ends = [data, *(t.begin + prod(t.shape) * t.dtype.itemsize for t in tensors.values())]
        if max(ends) != size:
            raise ValueError(f"it has {size} bytes, by its header {max(ends)}")
    except OSError as cause:
        raise BadInput(f"weights '{path}' cannot be read: {cause.strerror}; copy them again") from (
            cause
        )
    except MALFORMED as cause:
        raise BadInput(
            f"'{path}' is not a whole safetensors file ({cause}); copy or download it again"
        ) from cause
    return tensors


def stored_tensor(path: Path, name: str, entry: Mapping[str, Any], data: int) -> StoredTensor:
    """One checked entry of a header; ``data`` is the offset at which tensors begin."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor '{name}' has type {entry['dtype']}, which is not trained")
    dtype, shape = DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
    begin, end = entry["data_offsets"]
    if min(begin, *shape, 0) < 0 or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor '{name}' of shape {shape} has {end - begin} bytes")
    return StoredTensor(path, name, dtype, shape, data + begin)


def read_into(stored: StoredTensor, target: torch.Tensor) -> None:
    """Fill ``target``, which has the same shape; its device and type are kept.

    Raises:
        BadInput: the file cannot be read, or has become shorter.
    """
    direct = target.dtype == stored.dtype and target.device.type == "cpu" and target.is_contiguous()
    values = target.detach() if direct else torch.empty(stored.shape, dtype=stored.dtype)
    try:
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.begin)
            left = memoryview(plain_bytes(values))
            while len(left):
                count = file.readinto(left)
                if not count:
                    raise OSError(0, "it has become shorter")
                left = left[count:]
    except OSError as cause:
        raise BadInput(
            f"tensor '{stored.name}' cannot be read from '{stored.file}': {cause.strerror}"
        ) from cause
    if not direct:
        with torch.no_grad():
            target.copy_(values)


class Checksum(Protocol):
    """A checksum of `hashlib`."""

    def update(self, data: Any, /) -> None:
        """Add bytes."""
        ...


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], checksum: Checksum | None = None
) -> None:
    """Write a file tensor by tensor, without copying tensors that are contiguous and on the CPU.

    ``checksum`` is updated with every byte that is written.

    Raises:
        OSError: the file cannot be written.
        BadInput: the format does not support the type of a tensor.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    # The widest types first, so that all tensors are aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in ordered:
        if tensor.dtype not in names:
            raise BadInput(
                f"tensor '{name}' has type {tensor.dtype}, which is not saved; "
                f"use one of {', '.join(str(dtype) for dtype in names)}"
            )
        end = begin + bytes_of(tensor)
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:

        def write(data: bytes | memoryview) -> None:
            file.write(data)
            if checksum is not None:
                checksum.update(data)

        write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            write(memoryview(plain_bytes(tensor.detach().cpu().contiguous())))
