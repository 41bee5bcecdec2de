"""Attributes of classes and modules replaced for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner`` with another attribute ``name``; afterwards as before, inherited or its own."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
