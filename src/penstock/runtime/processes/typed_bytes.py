"""Messages between ranks as bytes whose types are written beside them; reading runs no code.

    8 bytes: length n of the JSON    n bytes: JSON    the tensors' bytes, one after another

The JSON holds plain values (`penstock.runtime.plain_values`), paths, sets, ranges, element types,
and the dataclasses that sender and receiver name. A tensor in it is its type, its shape and where
its bytes begin.
"""

import json
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

import torch

from penstock.errors import BadInput, RunFailed
from penstock.runtime.plain_values import Reader, from_json, to_json
from penstock.runtime.weights.safetensors_file import DTYPES, bytes_of

__all__ = ["decode", "encode"]

TYPES = {**DTYPES, "C128": torch.complex128}
NAMES = {dtype: name for name, dtype in TYPES.items()}
ALIGNMENT_BYTES = 16


def encode(value: object, types: tuple[type, ...] = ()) -> torch.Tensor:
    """The bytes of a message; ``types`` are the dataclasses that it may hold.

    Raises:
        BadInput: it holds a value of any other class, which is named.
    """
    tensors: list[tuple[int, torch.Tensor]] = []
    size = 0

    def also(item: Any) -> dict[str, Any] | None:
        nonlocal size
        if isinstance(item, torch.Tensor):
            if item.dtype not in NAMES or item.layout != torch.strided:
                raise BadInput(
                    f"a message holds a Tensor of {item.dtype}, {item.layout}; send a "
                    f"dense one of a common type"
                )
            begin, size = size, aligned(size + bytes_of(item))
            tensors.append((begin, item))
            return {"$tensor": [NAMES[item.dtype], list(item.shape), begin]}
        if type(item) in types:
            held = {field.name: getattr(item, field.name) for field in fields(item)}
            return {f"${type(item).__name__}": write(held)}
        if isinstance(item, Path):
            return {"$path": str(item)}
        if isinstance(item, torch.dtype) and item in NAMES:
            return {"$dtype": NAMES[item]}
        if isinstance(item, set | frozenset):
            return {"$set": [write(each) for each in item]}
        if hasattr(item, "_fields"):
            raise BadInput(f"a message holds a {type(item).__name__}; send it as a plain tuple")
        return None

    def write(item: Any) -> Any:
        return to_json(item, "a message between ranks", also, keeper="is not sent")

    text = json.dumps(write(value), separators=(",", ":")).encode()
    start = aligned(8 + len(text))
    text = text.ljust(start - 8)
    message = torch.empty(start + size, dtype=torch.uint8)
    message[:start] = torch.frombuffer(
        bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8
    )
    for begin, tensor in tensors:
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        message[start + begin : start + begin + len(plain)] = plain
    return message


def decode(message: torch.Tensor, types: tuple[type, ...] = ()) -> Any:
    """The value that `encode` was given; only ``types`` are created besides plain values.

    Raises:
        RunFailed: `encode` has not made these bytes.
    """
    length = int.from_bytes(message[:8].numpy().tobytes(), "little")
    data = message[8 + length :]

    def tensor_of(place: Any) -> torch.Tensor:
        name, shape, begin = place
        dtype = TYPES[name]
        size = prod(shape) * dtype.itemsize
        if min(begin, *shape, 0) < 0 or begin + size > len(data):
            raise ValueError(f"a tensor of shape {shape} begins at byte {begin} of {len(data)}")
        # A copy, so that a small tensor does not keep the whole message.
        return data[begin : begin + size].clone().view(dtype).reshape(shape)

    readers: dict[str, Reader] = {
        "$tensor": lambda place, _: tensor_of(place),
        "$path": lambda text, _: Path(text),
        "$dtype": lambda name, _: TYPES[name],
        "$set": lambda items, read: set(read(items)),
        **{f"${kind.__name__}": creator(kind) for kind in types},
    }
    try:
        values = json.loads(message[8 : 8 + length].numpy().tobytes())
        return from_json(values, "a message", readers)
    except (BadInput, ValueError, RecursionError) as cause:
        raise RunFailed(
            f"a message from another rank cannot be read ({str(cause)[:150]}); start all ranks "
            f"with the same version of Penstock"
        ) from cause


def creator(kind: type) -> Reader:
    """Creates the dataclass ``kind`` from its fields."""
    return lambda held, read: kind(**{name: read(value) for name, value in held.items()})


def aligned(size: int) -> int:
    """``size`` rounded up."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
