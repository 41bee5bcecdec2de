"""Quantities with units, as in cluster files."""

import re
from decimal import Decimal
from typing import Literal, TypeAlias

__all__ = ["Dimension", "parse_quantity"]

Dimension: TypeAlias = Literal["memory", "bandwidth", "time"]

PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BINARY_PREFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
BYTES = {f"{prefix}B": scale for prefix, scale in (PREFIXES | BINARY_PREFIXES).items()}
BITS = {f"{prefix}b": scale / 8 for prefix, scale in PREFIXES.items()}

UNITS: dict[Dimension, dict[str, float]] = {
    "memory": BYTES,
    "bandwidth": {f"{unit}/s": scale for unit, scale in (BYTES | BITS).items()},
    "time": {"s": 1, "ms": 1e-3, "us": 1e-6, "\N{MICRO SIGN}s": 1e-6, "ns": 1e-9},
}


def parse_quantity(text: str, dimension: Dimension) -> float:
    """A number with a unit, converted to bytes, bytes per second or seconds.

    >>> parse_quantity("25 Gb/s", "bandwidth")
    3125000000.0
    >>> parse_quantity("16GB", "memory")
    16000000000.0

    Raises:
        ValueError: not a number, or a unit that does not belong to ``dimension``.
    """
    # Nothing is given back: a text that does not match would otherwise take its length squared.
    match = re.fullmatch(r"\s*+([-+]?[\d.]++(?:[eE][-+]?\d++)?)\s*+(\S*+)\s*+", text)
    units = UNITS[dimension]
    if not match:
        raise ValueError(f"write a number and a unit, one of {', '.join(units)}")
    figure, unit = match.groups()
    if unit not in units:
        raise ValueError(f"unknown unit '{unit}'; use one of {', '.join(units)}")
    try:
        # Decimal arithmetic, so that "5 us" gives exactly the float 5e-6.
        return float(Decimal(figure) * Decimal(str(units[unit])))
    except ArithmeticError:
        raise ValueError(f"'{figure}' is not a number that a computer holds") from None
