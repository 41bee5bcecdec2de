"""What is made once for batches of one size, and kept for a bounded number of sizes."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from penstock.capture.lengths import LengthsOf
from penstock.errors import BadInput

__all__ = ["BatchSize", "Prepared", "check_sizes"]

Made = TypeVar("Made")

BatchSize: TypeAlias = tuple[int, LengthsOf, bool]
"""The number of samples, the lengths, and whether it is trained on."""

SIZES_KEPT = 256


class Prepared(Generic[Made]):
    """The things made for the sizes used last, so that lengths without end fill no memory."""

    def __init__(self, kept: int = SIZES_KEPT) -> None:
        self._kept = kept
        self._made: dict[BatchSize, Made] = {}

    def find(self, size: BatchSize, make: Callable[[], Made]) -> Made:
        """What was made for ``size``, or what ``make`` makes now."""
        found = self._made.pop(size, None)
        if found is None:
            found = make()
            if len(self._made) >= self._kept:
                del self._made[next(iter(self._made))]
        # A dict keeps the order in which keys were put in: the first is the one not used longest.
        self._made[size] = found
        return found


def check_sizes(sizes_by_rank: Sequence[Sequence[float]], names: Sequence[str]) -> None:
    """Raise `BadInput` where two ranks have batches of different sizes.

    Each rank gives the sizes with these ``names``, for one batch after another.
    """
    first = sizes_by_rank[0]
    for rank, sizes in enumerate(sizes_by_rank):
        for place, (own, expected) in enumerate(zip(sizes, first, strict=True)):
            if own != expected:
                raise BadInput(
                    f"the ranks were given different batches: {names[place % len(names)]} is "
                    f"{own:g} on rank {rank} and {expected:g} on rank 0; give every rank the same "
                    "batches in the same order"
                )
