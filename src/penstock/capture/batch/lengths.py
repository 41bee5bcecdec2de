"""Sizes that vary from batch to batch, as the user names them: the lengths of sequences.

    dynamic={"input_ids": {1: "length"}, "labels": {1: "length"}}

says that dimension 1 of two tensors of the batch varies, and is always the same in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from penstock.errors import BadInput
from penstock.files import Table


@dataclass(frozen=True)
class Length(Table):
    """A size that varies from batch to batch, with a name of the user's choice.

    Batches outside ``min`` to ``max`` are refused. ``max`` also limits the size of messages.
    """

    name: str
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        if self.min < 1 or (self.max is not None and self.max < self.min):
            raise BadInput(
                f"length '{self.name}' is declared from {self.min} to {self.max}; "
                "1 <= min <= max is needed"
            )


Dimensions: TypeAlias = Mapping[int, str | Length]
"""The dimensions of a tensor that vary, by index, each with its length."""

Dynamic: TypeAlias = Mapping[str | int | tuple[str | int, ...], Dimensions]
"""The dimensions that vary, by the tensor's key in the batch (a tuple of keys if nested). Equal
names mean equal sizes."""

LengthsOf: TypeAlias = tuple[int, ...]
"""The lengths of one batch, in the order in which ``dynamic`` names them; empty without any."""

LengthPlaces: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""Places of each length: pairs of leaf index and dimension."""


class SizeOfLengths(Protocol):
    """A size that depends on the lengths of a batch."""

    def at(self, lengths: Sequence[int]) -> int:
        """The size for these lengths."""
        ...


def named_lengths(dynamic: Dynamic) -> tuple[Length, ...]:
    """Every length once, in order of first mention, with its limits if declared."""
    found: dict[str, Length] = {}
    declared = [named for dimensions in dynamic.values() for named in dimensions.values()]
    for named in declared:
        length = named if isinstance(named, Length) else Length(named)
        known = found.setdefault(length.name, length)
        if known != length:
            plain = Length(length.name)
            if plain not in (known, length):
                raise BadInput(
                    f"length '{length.name}' is declared with two ranges, "
                    f"{known.min} to {known.max} and {length.min} to {length.max}; give it one"
                )
            found[length.name] = length if known == plain else known
    return tuple(found.values())
