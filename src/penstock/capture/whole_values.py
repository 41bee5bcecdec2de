"""Values of the whole step that slices of a batch need: computed once, and sent as a last leaf.

A loss with several terms divides each by its own number of terms over the whole step (see
`penstock.capture.loss_terms`). These numbers depend only on the batch, which every rank has, so
each rank computes them before the iteration. They form one row, equal for every sample, so this
leaf can be cut into slices like any other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.capture.batch_part import Leaf, PartialLeaf
from penstock.capture.dataflow import Dataflow
from penstock.capture.loss_weight import target_weight
from penstock.capture.operators import packet_name
from penstock.capture.stage_module import (
    StagePart,
    build_module,
    leaves_of_lengths,
    needed,
    sized_only,
)
from penstock.errors import BadInput

__all__ = ["WholeValues", "whole_values"]


class WholeValues:
    """Computes the values of a step from the leaves ``indices`` of its batches.

    ``counts[i]``: value ``i`` is a number of valid targets. ``adds[i]``: the value of two batches
    together is the sum of their values. Of the leaves ``sized`` only sizes are read; ``read`` are
    the others.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        indices: Sequence[int],
        counts: Sequence[bool],
        adds: Sequence[bool],
        sized: frozenset[int],
    ) -> None:
        self._module = module
        self.read = frozenset(indices) - sized
        self._indices, self._counts, self._adds = tuple(indices), tuple(counts), tuple(adds)

    def beside(self, batches: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The leaves of every batch, with the additional last leaf; all batches are one step.

        Raises:
            BadInput: batches have different lengths, and a value needs them joined.
        """
        rows = self._rows([self._read(batch) for batch in batches])
        return [
            [*batch, row.expand(batch[0].shape[0], -1)]
            for batch, row in zip(batches, rows, strict=True)
        ]

    def beside_parts(self, parts: Sequence[Sequence[PartialLeaf]]) -> list[list[PartialLeaf]]:
        """The leaves of every part; the additional one is absent where a row to read is absent.

        Raises:
            BadInput: as `beside`.
        """
        found = [self._whole(part) for part in parts]
        read = [leaves for leaves in found if leaves is not None]
        if len(read) < len(parts):
            return [[*part, beside_these(part, None)] for part in parts]
        rows = self._rows(read)
        return [[*part, beside_these(part, row)] for part, row in zip(parts, rows, strict=True)]

    def _rows(self, read: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The values of one step for each of its batches; these are the leaves that are read.

        Raises:
            BadInput: see `beside`.
        """
        alike = all([x.shape[1:] for x in own] == [x.shape[1:] for x in read[0]] for own in read)
        if alike:
            joined = [torch.cat(parts) if len(read) > 1 else parts[0] for parts in zip(*read)]  # noqa: B905
            row = self._row(joined)
        elif all(self._adds):
            row = torch.stack([self._row(own) for own in read]).sum(0)
        else:
            raise BadInput(
                f"a step was given {len(read)} batches of different lengths, but a term of the "
                f"loss is divided by a number that must be computed from all of them together; pad "
                f"them to one length, or give each a step of its own"
            )
        return [row] * len(read)

    def of_each_part(self, batch: Sequence[Leaf], cut: Sequence[range]) -> list[Leaf]:
        """The leaves of a batch with a last leaf that differs between the parts ``cut``.

        If a part has no valid target for a term, its sum is 0 and its divisor 1 instead of 0: such
        a micro-batch does not change the weights.
        """
        read, found = self._whole(batch), list[torch.Tensor]()
        if read is None:
            return [*batch, beside_these(batch, None)]
        for rows in cut:
            row = self._row([leaf[rows.start : rows.stop] for leaf in read], empty=1.0)
            found.append(row.expand(len(rows), -1))
        whole = torch.cat(found)
        is_part = isinstance(batch[0], PartialLeaf)
        return [*batch, beside_these(batch, whole) if is_part else whole]

    def _row(self, leaves: Sequence[torch.Tensor], empty: float = 0.0) -> torch.Tensor:
        """All values side by side; ``empty`` replaces a count of 0."""
        with torch.no_grad():
            found = [torch.as_tensor(value).to(torch.float64) for value in self._module(*leaves)]
        for place, is_count in enumerate(self._counts):
            if is_count and empty:
                found[place] = torch.where(found[place] == 0, empty, found[place])
        return torch.cat([value.reshape(-1) for value in found])

    def _read(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The leaves to read, on the CPU, where tensors made by the model's code are."""
        return on_cpu([batch[index] for index in self._indices])

    def _whole(self, batch: Sequence[Leaf]) -> list[torch.Tensor] | None:
        """The same, where rows of a leaf may be on other ranks only: then ``None``."""
        whole = [whole_leaf(batch[i], sized=i not in self.read) for i in self._indices]
        found = [leaf for leaf in whole if leaf is not None]
        return on_cpu(found) if len(found) == len(whole) else None


def on_cpu(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the CPU; those on the meta device stay there."""
    return [leaf if leaf.is_meta else leaf.cpu() for leaf in leaves]


def whole_leaf(leaf: Leaf, *, sized: bool) -> torch.Tensor | None:
    """A leaf with all its rows, or its size only; ``None`` if rows are on other ranks only."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.without_values(leaf.shape[0]) if sized else leaf.whole


def beside_these(batch: Sequence[Leaf], row: torch.Tensor | None) -> PartialLeaf:
    """The additional leaf of a part of a batch, with the same values in every row; or absent."""
    first = batch[0]
    assert isinstance(first, PartialLeaf)
    samples = first.shape[0]
    if row is None:
        return PartialLeaf((samples, 0), torch.float64, first.number)
    values = row.expand(samples, -1)
    return PartialLeaf(values.shape, values.dtype, first.number, (range(samples),), values)


def whole_values(flow: Dataflow, attributes: Mapping[str, Any]) -> WholeValues | None:
    """The computation of the last leaf of ``flow``; None if no slice needs it.

    Raises:
        BadInput: a value is computed from a tensor on the meta device.
    """
    clean = flow.clean
    if not clean.wholes:
        return None
    wanted = needed(flow, clean.wholes, ())
    leaves = [leaf for leaf in clean.leaves if leaf in wanted]
    leaves = [*leaves, *leaves_of_lengths(flow, wanted, leaves)] or [clean.leaves[0]]
    part = StagePart((), leaves, (), clean.wholes)
    module = build_module(flow, part, attributes, ())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise BadInput(
                f"the number of terms of the loss is computed from '{name}', which is on the meta "
                f"device; build it with its values"
            )
    counts = [node.target is target_weight for node in clean.wholes]
    adds = [
        is_count or node is clean.rows or packet_name(node) == "sum"
        for is_count, node in zip(counts, clean.wholes, strict=True)
    ]
    indices = [clean.leaves.index(leaf) for leaf in leaves]
    return WholeValues(module, indices, counts, adds, sized_only(module, indices))
