"""Sizes that vary from batch to batch, as the user names them: the lengths of sequences.

    dynamic={"input_ids": {1: "length"}, "labels": {1: "length"}}

says that dimension 1 of two tensors of the batch varies, and is always the same in both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from penstock.errors import BadInput

__all__ = [
    "Dimensions",
    "Dynamic",
    "Length",
    "LengthPlaces",
    "LengthsOf",
    "SizeOfLengths",
    "name_of",
    "named_lengths",
]


@dataclass(frozen=True)
class Length:
    """A size that varies from batch to batch, with a name of the user's choice.

    Batches outside ``min`` to ``max`` are refused. ``max`` also limits the size of messages.

    With ``buckets``, a batch runs at the smallest that holds it, and the end of each tensor is
    filled with the ``pad`` that is declared for it. Without pad values batches run as they are.
    """

    name: str
    min: int = 1
    max: int | None = None
    buckets: tuple[int, ...] = ()
    pad: float | None = None

    def __post_init__(self) -> None:
        if self.min < 1 or (self.max is not None and self.max < self.min):
            raise BadInput(
                f"length '{self.name}' is declared from {self.min} to {self.max}; "
                "1 <= min <= max is needed"
            )
        buckets = sorted(set(self.buckets))
        object.__setattr__(self, "buckets", tuple(buckets))
        if buckets and (buckets[0] < self.min or buckets[-1] > (self.max or buckets[-1])):
            raise BadInput(
                f"length '{self.name}' is declared from {self.min} to {self.max or 'any'}, with "
                f"the buckets {buckets}; all must be within"
            )


Dimensions: TypeAlias = Mapping[int, str | Length]
"""The dimensions of a tensor that vary, by index, each with its length."""

Dynamic: TypeAlias = Mapping[str | int | tuple[str | int, ...], Dimensions]
"""The dimensions that vary, by the tensor's key in the batch (a tuple of keys if nested). Equal
names mean equal sizes."""

LengthsOf: TypeAlias = tuple[int, ...]
"""The lengths of one batch, in the order in which ``dynamic`` names them; empty without any."""

LengthPlaces: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""For each length, where it is found: pairs of leaf index and dimension."""


class SizeOfLengths(Protocol):
    """A size that depends on the lengths of a batch."""

    def at(self, lengths: Sequence[int]) -> int:
        """The size for these lengths."""
        ...


def named_lengths(dynamic: Dynamic) -> tuple[Length, ...]:
    """Every length once, in order of first mention, with its limits if declared.

    Raises:
        BadInput: two declarations of one name contradict each other.
    """
    found: dict[str, Length] = {}
    for declared in every_length(dynamic):
        length = replace(declared, pad=None)
        known = found.setdefault(length.name, length)
        if known != length:
            plain = Length(length.name)
            if plain not in (known, length):
                raise BadInput(
                    f"length '{length.name}' is declared with two ranges, {in_words(known)} and "
                    f"{in_words(length)}; give it one"
                )
            found[length.name] = length if known == plain else known
    return tuple(found.values())


def every_length(dynamic: Dynamic) -> Iterable[Length]:
    """The lengths as declared, dimension by dimension."""
    for dimensions in dynamic.values():
        for named in dimensions.values():
            yield named if isinstance(named, Length) else Length(named)


def in_words(length: Length) -> str:
    """The range of a length in words."""
    buckets = f" with buckets {list(length.buckets)}" if length.buckets else ""
    return f"{length.min} to {length.max}{buckets}"


def name_of(named: str | Length) -> str:
    """The name of a length, declared with limits or without."""
    return named.name if isinstance(named, Length) else named
