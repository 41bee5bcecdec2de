"""Find the dimensions that vary from batch to batch, from some batches."""

from collections.abc import Iterable

from penstock.capture.batch.layout import BatchLayout, RowsOf, key_in_batch, layout_of
from penstock.capture.batch.lengths import Dynamic
from penstock.capture.contract import Batch
from penstock.errors import BadInput

ONLY = "length"
"""The name of a length if there is only one."""


def find_dynamic(batches: Iterable[Batch], rows: RowsOf | None = None) -> Dynamic:
    """The dimensions that differ between batches, in the form of ``dynamic``; empty if none does.

    Dimensions that have equal sizes in each batch get one name. So give enough batches to separate
    lengths that are equal only by chance. The number of samples may always vary and is not
    included. ``rows`` is as in `capture_model`.

    >>> import torch
    >>> short, long = torch.zeros(4, 16, dtype=torch.int), torch.zeros(4, 30, dtype=torch.int)
    >>> find_dynamic([{"words": short, "labels": short}, {"words": long, "labels": long}])
    {'words': {1: 'length'}, 'labels': {1: 'length'}}

    Raises:
        BadInput: fewer than two batches, or they differ in more than sizes.
    """
    layouts = [layout_of(batch, rows=rows) for batch in batches]
    if len(layouts) < 2:
        raise BadInput(
            f"{len(layouts)} batch was given to find the dimensions that vary, which takes two of "
            "different lengths; give more, or declare them"
        )
    first = layouts[0]
    for number, layout in enumerate(layouts[1:], start=1):
        check_same_but_sizes(first, layout, number)
    sizes: dict[tuple[int, int], tuple[int, ...]] = {}
    for leaf, spec in enumerate(first.leaves):
        for dim in range(1, len(spec.shape)):  # also of what samples share, behind the samples
            found = tuple(layout.leaves[leaf].shape[dim] for layout in layouts)
            if len(set(found)) > 1:
                sizes[leaf, dim] = found
    names = names_of_lengths(first, sizes)
    dynamic: dict[str | int | tuple[str | int, ...], dict[int, str]] = {}
    paths = first.paths
    for (leaf, dim), found in sizes.items():
        own = dynamic.setdefault(key_in_batch(paths[leaf]), {})
        own[dim - first.leaves[leaf].in_front] = names[found]
    return dynamic


def check_same_but_sizes(first: BatchLayout, other: BatchLayout, number: int) -> None:
    """Raise `BadInput` if batches differ in more than sizes."""
    if first.structure != other.structure or len(first.leaves) != len(other.leaves):
        raise BadInput(
            f"batch {number} is not made of the same entries as batch 0 "
            f"({', '.join(leaf.name for leaf in other.leaves)} and "
            f"{', '.join(leaf.name for leaf in first.leaves)}, "
            "constants included); let every batch have one form"
        )
    for one, two in zip(first.leaves, other.leaves, strict=True):
        if len(one.shape) != len(two.shape) or one.dtype != two.dtype:
            raise BadInput(
                f"{one.name} has shape {two.shape} of {two.dtype} in batch {number} and "
                f"{one.shape} of {one.dtype} in batch 0; let every batch have one form"
            )


def names_of_lengths(
    layout: BatchLayout, sizes: dict[tuple[int, int], tuple[int, ...]]
) -> dict[tuple[int, ...], str]:
    """A name for each tuple of sizes; if there are several, that of the first tensor with it."""
    different = dict.fromkeys(sizes.values())
    if len(different) == 1:
        return {found: ONLY for found in different}
    paths, names = layout.paths, dict[tuple[int, ...], str]()
    for (leaf, dim), found in sizes.items():
        path = ".".join(map(str, paths[leaf]))
        own = [at for at in sizes if at[0] == leaf]
        names.setdefault(found, f"{path} {ONLY}" if len(own) == 1 else f"{path} {ONLY} {dim}")
    return names
