"""Batches padded to the lengths of their buckets, where buckets and pad values are declared.

Length("length", buckets=(16, 32), pad=0)        a batch of length 20 runs at 32
Length("length", buckets=(16, 32))               it runs at 20: there is nothing to fill it with
"""

from collections.abc import Mapping

from penstock.capture.batch_layout import BatchLayout
from penstock.capture.batch_part import AnyLeaf, filled_up
from penstock.capture.lengths import LengthsOf
from penstock.errors import BadInput

__all__ = ["is_padded", "padded"]


def is_padded(layout: BatchLayout, number: int) -> bool:
    """Whether batches are padded along this length."""
    places = layout.length_places[number]
    return bool(layout.lengths[number].buckets) and any(
        dim == own for leaf, dim in places for own, _ in layout.leaves[leaf].pads
    )


def padded(layout: BatchLayout, leaves: Mapping[int, AnyLeaf]) -> dict[int, AnyLeaf]:
    """Leaves padded to the smallest buckets that hold them.

    Raises:
        BadInput: a batch is longer than every bucket, or one of its tensors lacks a pad value.
    """
    if not any(is_padded(layout, number) for number in range(len(layout.lengths))):
        return dict(leaves)
    bucket = _bucket_for(layout, layout.lengths_of(leaves))
    found: dict[int, AnyLeaf] = {}
    for index, leaf in leaves.items():
        spec = layout.leaves[index]
        for dim, number in spec.varying:
            missing = bucket[number] - leaf.shape[dim]
            if missing > 0:
                pad = dict(spec.pads).get(dim)
                if pad is None:
                    length = layout.lengths[number]
                    raise BadInput(
                        f"dimension {dim} of {spec.name} is {leaf.shape[dim]}, and the other "
                        f"tensors are filled up to {length.name} {bucket[number]}; declare what to "
                        f"fill this one up with, too: Length('{length.name}', ..., pad=0)"
                    )
                leaf = filled_up(leaf, dim, missing, pad)
        found[index] = leaf
    return found


def _bucket_for(layout: BatchLayout, lengths: LengthsOf) -> LengthsOf:
    found: list[int] = []
    for number, (length, size) in enumerate(zip(layout.lengths, lengths, strict=True)):
        fitting = [bucket for bucket in length.buckets if bucket >= size]
        if is_padded(layout, number) and not fitting:
            raise BadInput(
                f"the batch has {length.name} {size}, but the largest bucket is "
                f"{length.buckets[-1]}; trim the batch, or declare a larger bucket"
            )
        found.append(fitting[0] if is_padded(layout, number) else size)
    return tuple(found)
