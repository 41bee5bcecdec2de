"""Values as bytes and back. Reading makes plain values, tensors and named classes; it runs no code.

A number, a text or nothing is JSON, which is quick. Everything else is what `torch.save` writes. It
is read with ``weights_only``, which makes no object of a class that it does not know.
"""

import io
import json
import re
from typing import Any

import torch

from penstock.errors import BadInput

SCALARS = (type(None), bool, int, float, str)
ARCHIVE = b"PK"
"""First bytes of an archive of `torch.save`; no JSON begins with them."""

REFUSED_CLASS = re.compile(r"GLOBAL (\S+) was not an allowed")


def to_bytes(value: object, name: str) -> memoryview:
    """The bytes of a value; ``name`` is its name in error messages."""
    if type(value) in SCALARS:
        return memoryview(bytearray(json.dumps(value).encode()))
    archive = io.BytesIO()
    try:
        torch.save(value, archive)
    # Any class may fail in its own way.
    except Exception as cause:
        raise BadInput(f"{name} cannot be written ({first_line(cause)})") from cause
    return archive.getbuffer()


def from_bytes(data: bytes, name: str, types: tuple[type, ...] = ()) -> Any:
    """The value that `to_bytes` was given; ``types`` are the classes that it may hold."""
    try:
        if not data.startswith(ARCHIVE):
            return json.loads(data)
        # An empty `bytes` is written as a call of its class.
        with torch.serialization.safe_globals([bytes, *types]):
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    # What damaged bytes raise is not documented.
    except Exception as cause:
        if refused := REFUSED_CLASS.search(str(cause)):
            raise BadInput(
                f"{name} holds a {refused[1]}, which is not kept; use numbers, text, lists, "
                f"tuples, dictionaries and tensors"
            ) from cause
        raise BadInput(f"{name} cannot be read ({first_line(cause)}); it is damaged") from cause


def first_line(cause: Exception) -> str:
    """The beginning of an error's message."""
    return (str(cause).partition("\n")[0] or type(cause).__name__)[:100]
