"""The words with which a call is refused."""

from collections.abc import Callable
from typing import Any

from penstock.errors import PenstockError


def refusal_of(act: Callable[..., object], *given: Any, **named: Any) -> str:
    """The message of the error that a call raises; empty if it raises none."""
    return named_refusal_of(act, *given, **named).partition(": ")[2]


def named_refusal_of(act: Callable[..., object], *given: Any, **named: Any) -> str:
    """The same behind the name of the error's class."""
    try:
        act(*given, **named)
    except PenstockError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return ""
