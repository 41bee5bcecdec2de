"""Plain values and tensors as JSON: what a reader makes of it is data, never code.

Numbers, text, lists and dictionaries with text for keys stand as they are. Everything else is a
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
    """``value`` as JSON can hold it; ``name`` says in messages what it is.

    Raises:
        BadInput: it holds something else than plain values and tensors.
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
    """What `to_json` was given; ``name`` says in messages where it stands.

    Raises:
        BadInput: it is not what `to_json` writes.
    """
    try:
        return read(value)
    except (ValueError, TypeError, KeyError, RuntimeError, binascii.Error) as cause:
        raise BadInput(f"{name} cannot be read ({cause}); it is damaged") from cause


def read(value: Any) -> Any:
    """`from_json` without words for what fails."""
    if isinstance(value, list):
        return [read(item) for item in value]
    if not isinstance(value, dict):
        return value
    sign = next(iter(value), "")
    if not sign.startswith(SIGN):
        return {key: read(item) for key, item in value.items()}
    return READERS[sign](value[sign])


def tensor_from_json(value: Any) -> torch.Tensor:
    """A tensor of its own memory."""
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
