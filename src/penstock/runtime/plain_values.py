"""Converts plain values and tensors to JSON and back. Reading creates data and never runs code.

Numbers, text, lists and dictionaries with text keys are written as they are. Everything else is a
dictionary with one key that begins with ``$``: ``{"$tuple": [...]}``, ``{"$tensor": {...}}``.
"""

import base64
import binascii
from collections.abc import Callable, Mapping
from math import inf, isfinite, nan, prod
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from penstock.errors import BadInput
from penstock.runtime.weights.safetensors_file import DTYPES, plain_bytes

__all__ = ["NONE_MORE", "Reader", "from_json", "to_json"]

NUMBERS = {"nan": nan, "inf": inf, "-inf": -inf}
SIGN = "$"

Reader: TypeAlias = Callable[[Any, Callable[[Any], Any]], Any]
"""Makes a value of what stands behind its ``$`` key; the second argument reads values inside it."""

NONE_MORE: Mapping[str, Reader] = MappingProxyType({})


def to_json(
    value: Any,
    name: str,
    also: Callable[[Any], dict[str, Any] | None] = lambda _: None,
    *,
    keeper: str = "a checkpoint does not keep",
) -> Any:
    """Convert ``value`` to JSON values; ``name`` and ``keeper`` are used in error messages.

    ``also`` converts more kinds of values, as dictionaries with one ``$`` key; it returns ``None``
    for all others.

    Raises:
        BadInput: it holds other things than plain values and tensors.
    """

    def write(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if isfinite(value) else {"$float": str(value)}
        found = also(value)
        if found is not None:
            return found
        if isinstance(value, list):
            return [write(item) for item in value]
        if isinstance(value, tuple):
            return {"$tuple": [write(item) for item in value]}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, torch.Tensor):
            return {"$tensor": tensor_to_json(value, name)}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and not key.startswith(SIGN) for key in value):
                return {key: write(item) for key, item in value.items()}
            return {"$pairs": [[write(key), write(item)] for key, item in value.items()]}
        raise BadInput(
            f"{name} holds a {type(value).__name__}, which {keeper}; use numbers, text, lists, "
            f"tuples, dictionaries and tensors"
        )

    return write(value)


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


def from_json(value: Any, name: str, also: Mapping[str, Reader] = NONE_MORE) -> Any:
    """Convert back what `to_json` wrote; ``name`` is used in error messages.

    ``also`` reads more kinds of values, by their ``$`` keys.

    Raises:
        BadInput: `to_json` would not write this.
    """
    readers = {**READERS, **also}

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read(item) for item in value]
        if not isinstance(value, dict):
            return value
        sign = next(iter(value), "")
        if not sign.startswith(SIGN):
            return {key: read(item) for key, item in value.items()}
        return readers[sign](value[sign], read)

    try:
        return read(value)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        binascii.Error,
    ) as cause:
        why = str(cause).partition("\n")[0][:100]
        raise BadInput(f"{name} cannot be read ({why}); it is damaged") from cause


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


READERS: dict[str, Reader] = {
    "$float": lambda text, _: NUMBERS[text],
    "$tuple": lambda items, read: tuple(read(items)),
    "$bytes": lambda text, _: base64.b64decode(text, validate=True),
    "$tensor": lambda value, _: tensor_from_json(value),
    "$pairs": lambda pairs, read: {read(key): read(item) for key, item in pairs},
}
