"""A part of a batch: what one rank reads of it, where data are read only where they are used.

user       BatchPart    the rows of some tensors, under the user's keys
runtime    PartialLeaf  one tensor of the batch, of which this rank holds some rows or none
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from penstock.device import copied_to
from penstock.errors import BadInput

LeafKey: TypeAlias = str | int | tuple[str | int, ...]
"""The key of a tensor in the batch, as in ``dynamic``: a tuple of keys if nested, and ``()`` if the
batch is itself a tensor."""


@dataclass(frozen=True)
class BatchPart:
    """Part of a batch that one rank reads; `Pipeline.needs` lists the required leaves and rows.

    ``number`` identifies the batch: a count of steps, for example. ``samples`` is the number of
    samples of the whole batch. ``leaves`` are tensors by their keys in the batch; each has all rows
    of the batch, or exactly the rows that this rank needs, in order. What is not named is absent.
    ``lengths`` are the lengths of the whole batch by name, for models that have any. ``indices``
    are the places of the samples in the data set. Ranks compare all but the leaves.

    Raises:
        BadInput: there are no samples, or another number of indices.
    """

    number: int
    samples: int
    leaves: Mapping[LeafKey, torch.Tensor] = field(default_factory=dict[LeafKey, torch.Tensor])
    lengths: Mapping[str, int] = field(default_factory=dict[str, int])
    indices: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise BadInput(
                f"{self} has {self.samples} samples, at least 1 is needed; skip empty batches"
            )
        if self.indices and len(self.indices) != self.samples:
            raise BadInput(
                f"{self} has {self.samples} samples and {len(self.indices)} indices; give one for "
                f"each sample, or none"
            )

    def __str__(self) -> str:
        """``batch 3``, with the first indices if it has any."""
        if not self.indices:
            return f"batch {self.number}"
        shown = ", ".join(map(str, self.indices[:4])) + ", ..." * (len(self.indices) > 4)
        return f"batch {self.number} (samples {shown} of the data)"


class PartialLeaf:
    """A tensor of a batch of which this rank holds the ``rows``, one after another in ``held``.

    It stands for the whole tensor: ``shape`` is that of all rows, and a slice takes rows by their
    numbers in the batch. ``number`` is equal on ranks that were given the same batch. With
    ``sized`` a stage reads only sizes, so missing rows may be taken: they have no memory.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        number: float,
        rows: Sequence[range] = (),
        held: torch.Tensor | None = None,
        *,
        sized: bool = False,
    ) -> None:
        self.shape, self.dtype, self.number = torch.Size(shape), dtype, number
        self.rows, self.held, self.sized = tuple(rows), held, sized
        self.device = held.device if held is not None else torch.device("cpu")

    @property
    def whole(self) -> torch.Tensor | None:
        """The tensor, if all its rows are here."""
        return self.held if self.rows == (range(self.shape[0]),) else None

    def holds(self, rows: range) -> bool:
        """Return whether all these rows are here."""
        return any(own.start <= rows.start and rows.stop <= own.stop for own in self.rows)

    def to(self, device: torch.device) -> "PartialLeaf":
        """The same rows on another device."""
        held = None if self.held is None else copied_to(device, self.held)
        found = PartialLeaf(self.shape, self.dtype, self.number, self.rows, held, sized=self.sized)
        found.device = device
        return found

    def __getitem__(self, rows: slice) -> torch.Tensor:
        before = 0
        for own in self.rows:
            if own.start <= rows.start and rows.stop <= own.stop and self.held is not None:
                start = before + rows.start - own.start
                return self.held[start : start + rows.stop - rows.start]
            before += len(own)
        # Whoever builds a leaf gives it all rows that the rank's stages read.
        assert self.sized, f"rows {rows.start} to {rows.stop} of {self.shape} are not on this rank"
        return self.without_values(rows.stop - rows.start)

    def without_values(self, rows: int) -> torch.Tensor:
        """Return a tensor of ``rows`` rows, without memory, for code that reads only sizes."""
        one = torch.zeros((), dtype=self.dtype, device=self.device)
        return one.expand(rows, *self.shape[1:])


Leaf: TypeAlias = torch.Tensor | PartialLeaf
"""A tensor of a batch, as a rank was given it."""


def sliced(leaf: Leaf, own: range, whole: range) -> torch.Tensor:
    """The rows ``own`` that a replica computes of the micro-batch with the rows ``whole``.

    Without any it gets the first of the micro-batch, in case it must take part; or none, if that
    row is on other ranks only, because no stage of this one would run it.
    """
    if own:
        return leaf[own.start : own.stop]
    first = range(whole.start, whole.start + 1)
    if isinstance(leaf, PartialLeaf) and not leaf.sized and not leaf.holds(first):
        return torch.empty((0, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
    return leaf[first.start : first.stop]
