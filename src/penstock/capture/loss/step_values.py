"""Values of a whole step that the loss of a micro-batch needs, as one more leaf of the batch.

They depend on the batch alone, which every rank has. So each rank finds them before the step, by
one run of the user's program on the whole batch in which everything but the batch is absent. They
form one row, equal for every sample, that is cut into slices like the other leaves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from penstock.capture.batch.part import Leaf, PartialLeaf
from penstock.capture.record.absent import Absent
from penstock.capture.record.calls import Address
from penstock.capture.record.sizes import BatchSize
from penstock.capture.record.user_lines import line_with_source
from penstock.errors import BadInput
from penstock.torch_internals import pytree

Found = Mapping[Address, list[Any]]

AnyLeaf = TypeVar("AnyLeaf", bound=Leaf)
"""A leaf of a batch, or of a part."""


class StepValues:
    """The values of a step by ``probe``, from the leaves ``read`` of its batches.

    ``probe`` gets the leaves by index and the size of the batch. ``adds``: the values of two
    batches together are the sums of theirs. The leaves ``shared`` are equal for all samples.
    """

    def __init__(
        self,
        probe: Callable[[Mapping[int, torch.Tensor], BatchSize], Found],
        read: frozenset[int],
        lengths_of: Callable[[Mapping[int, torch.Tensor]], tuple[int, ...]],
        device: torch.device,
        *,
        adds: bool,
        shared: frozenset[int],
    ) -> None:
        self.read, self._shared = read, read & shared
        self._probe, self._lengths_of, self._adds = probe, lengths_of, adds
        self._device = device
        self._layouts: dict[tuple[int, ...], tuple[Any, list[Any]]] = {}
        """By lengths, the structure of the values in a row; the shape of each, and its type if it
        is a tensor and no number."""

    def of_row(self, row: torch.Tensor, lengths: tuple[int, ...]) -> tuple[float, Found]:
        """The samples of the step, and its values by address, from a row."""
        spec, tensors = self._layouts[lengths]
        samples, *parts = row.split([1, *(shape.numel() for shape, _ in tensors)])
        leaves = [
            float(part) if dtype is None else part.view(shape).to(dtype)
            for part, (shape, dtype) in zip(parts, tensors, strict=True)
        ]
        return float(samples), pytree.tree_unflatten(leaves, spec)

    def beside(self, batches: Sequence[Sequence[AnyLeaf]]) -> list[list[AnyLeaf]]:
        """The leaves of every batch, with the additional last leaf; all batches are one step.

        Of a part of a batch that leaf is absent where a row to read is absent.
        """
        found = [self._whole(batch) for batch in batches]
        read = [leaves for leaves in found if leaves is not None]
        row = self._row_of(read) if len(read) == len(batches) else None
        return [[*batch, beside_these(batch, row)] for batch in batches]

    def of_each_part(self, batch: Sequence[Leaf], cut: Sequence[range]) -> list[Leaf]:
        """The leaves of a batch in which each micro-batch (rows ``cut``) is a step of its own."""
        whole = self._whole(batch)
        if whole is None:
            return [*batch, beside_these(batch, None)]
        rows: list[torch.Tensor] = []
        for own in cut:
            leaves = {i: leaf[own.start : own.stop] for i, leaf in whole.items()}
            row = self._row_of([leaves])
            # A count of 0 would make the mean of no terms.
            rows.append(torch.where(row == 0, 1.0, row).expand(len(own), -1))
        return [*batch, beside_these(batch, torch.cat(rows))]

    def _row_of(self, batches: Sequence[Mapping[int, torch.Tensor]]) -> torch.Tensor:
        """The values of one step, made of batches given by their leaves."""
        first = batches[0]
        fit = all(
            [leaf.shape[1:] for leaf in own.values()] == [x.shape[1:] for x in first.values()]
            for own in batches
        )
        same = all(torch.equal(own[i][0], first[i][0]) for own in batches for i in self._shared)
        if fit and same:
            if len(batches) == 1:
                return self._row(first)
            return self._row({i: torch.cat([own[i] for own in batches]) for i in first})
        if self._adds:
            return torch.stack([self._row(own) for own in batches]).sum(0)
        raise BadInput(
            f"a step was given {len(batches)} batches of different lengths, or with different "
            f"tensors that all samples share, but a term of the loss is divided by a number that "
            f"must be computed from all of them together; pad them to one length, or give each a "
            f"step of its own"
        )

    def _row(self, leaves: Mapping[int, torch.Tensor]) -> torch.Tensor:
        samples = next(iter(leaves.values())).shape[0]
        lengths = self._lengths_of(leaves)
        own = {i: leaf if leaf.is_meta else leaf.to(self._device) for i, leaf in leaves.items()}
        found = self._probe(own, BatchSize(samples, lengths))
        for address, numbers_of in found.items():
            if any(type(number) is Absent for number in pytree.tree_leaves(numbers_of)):
                raise BadInput(
                    f"how many terms '{address[1]}' at {line_with_source(address[2])} has is made "
                    f"of activations on this batch, and was not on the example; capture with a "
                    f"batch on which it is, or give this one in other_examples"
                )
        values, spec = pytree.tree_flatten(dict(found))
        _, tensors = self._layouts[lengths] = spec, []
        numbers = [torch.tensor([float(samples)], dtype=torch.float64)]
        for value in values:
            dtype = value.dtype if isinstance(value, torch.Tensor) else None
            number = torch.as_tensor(0.0 if value is None else value, dtype=torch.float64).detach()
            tensors.append((number.shape, dtype))
            numbers.append(number.cpu().reshape(-1))
        return torch.cat(numbers)

    def _whole(self, batch: Sequence[Leaf]) -> dict[int, torch.Tensor] | None:
        """The leaves to read, and sizes of the others; None where rows are on other ranks only."""
        found: dict[int, torch.Tensor] = {}
        for index, leaf in enumerate(batch):
            if isinstance(leaf, torch.Tensor):
                found[index] = leaf
            elif index in self.read:
                if leaf.whole is None:
                    return None
                found[index] = leaf.whole
            else:
                found[index] = leaf.without_values(leaf.shape[0])
        return found


def beside_these(batch: Sequence[Leaf], row: torch.Tensor | None) -> Any:
    """The additional leaf of a batch or a part, with the same values in every row; or absent."""
    first, samples = batch[0], batch[0].shape[0]
    values = row.expand(samples, -1) if row is not None and row.dim() == 1 else row
    if not isinstance(first, PartialLeaf):
        return values
    if values is None:
        return PartialLeaf((samples, 0), torch.float64, first.number)
    return PartialLeaf(values.shape, values.dtype, first.number, (range(samples),), values)
