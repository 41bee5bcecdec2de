"""Converts plain values and tensors to JSON and back. Reading creates data and never runs code.

Numbers, text, lists and dictionaries with text keys are written as they are. Everything else is a
dictionary with one key that begins with ``$``: ``{"$tuple": [...]}``, ``{"$tensor": {...}}``.
"""

import base64
import binascii
from collections.abc import Callable, Mapping
from math import inf, isfinite, nan, prod
from typing import Any

import torch

from penstock.errors import BadInput
from penstock.runtime.weights.safetensors_file import DTYPES, plain_bytes

__all__ = ["from_json", "to_json"]

NUMBERS = {"nan": nan, "inf": inf, "-inf": -inf}
SIGN = "$"


def to_json(value: Any, name: str) -> Any:
    """Convert ``value`` to JSON values; ``name`` is used in error messages.

    Raises:
        BadInput: it holds other things than plain values and tensors.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else {"$float": str(value)}
    if isinstance(value, list):
        return [to_json(item, name) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item, name) for item in value]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.Tensor):
        return {"$tensor": tensor_to_json(value, name)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith(SIGN) for key in value):
            return {key: to_json(item, name) for key, item in value.items()}
        pairs = [[to_json(key, name), to_json(item, name)] for key, item in value.items()]
        return {"$pairs": pairs}
    raise BadInput(
        f"{name} holds a {type(value).__name__}, which a checkpoint does not keep; use numbers, "
        f"text, lists, tuples, dictionaries and tensors"
    )


def tensor_to_json(tensor: torch.Tensor, name: str) -> dict[str, Any]:
    """Type, shape and bytes of a small tensor."""
    names = {dtype: text for text, dtype in DTYPES.items()}
    if tensor.dtype not in names:
        raise BadInput(
            f"{name} holds a tensor of type {tensor.dtype}, which a checkpoint does not keep"
        )
    data = plain_bytes(tensor.detach().cpu().contiguous()).tobytes()
    return {
        "dtype": names[tensor.dtype],
        "shape": list(tensor.shape),
        "data": base64.b64encode(data).decode("ascii"),
    }


def from_json(value: Any, name: str) -> Any:
    """Convert back what `to_json` wrote; ``name`` is used in error messages.

    Raises:
        BadInput: `to_json` would not write this.
    """
    try:
        return read(value)
    except (ValueError, TypeError, KeyError, RuntimeError, binascii.Error) as cause:
        raise BadInput(f"{name} cannot be read ({cause}); it is damaged") from cause


def read(value: Any) -> Any:
    """Like `from_json`, but without its error message."""
    if isinstance(value, list):
        return [read(item) for item in value]
    if not isinstance(value, dict):
        return value
    sign = next(iter(value), "")
    if not sign.startswith(SIGN):
        return {key: read(item) for key, item in value.items()}
    return READERS[sign](value[sign])


def tensor_from_json(value: Any) -> torch.Tensor:
    """A tensor with its own memory."""
    dtype, shape = DTYPES[value["dtype"]], [int(size) for size in value["shape"]]
    data = bytearray(base64.b64decode(value["data"], validate=True))
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} has {len(data)} bytes")
    return (
        torch.frombuffer(data, dtype=dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


READERS: dict[str, Callable[[Any], Any]] = {
    "$float": NUMBERS.__getitem__,
    "$tuple": lambda items: tuple(read(items)),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$tensor": tensor_from_json,
    "$pairs": lambda pairs: {read(key): read(item) for key, item in pairs},
}
