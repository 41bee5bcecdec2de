"""Finding the dimensions that vary from batch to batch, from some batches."""

from collections.abc import Iterable

from penstock.capture.batch_layout import BatchLayout, LeafSpec, layout_of
from penstock.capture.layer_graph import Batch
from penstock.capture.lengths import Dynamic
from penstock.errors import BadInput

__all__ = ["find_dynamic"]

ONLY = "length"
"""What a length is called that is the only one."""


def find_dynamic(batches: Iterable[Batch]) -> Dynamic:
    """The dimensions that differ between batches, as ``dynamic`` takes them; empty if none does.

    Dimensions whose sizes are the same in each of the batches get one name, so give enough batches
    to tell lengths apart that only happen to be equal. The number of samples may always vary and is
    not named.

    >>> import torch
    >>> short, long = torch.zeros(4, 16, dtype=torch.int), torch.zeros(4, 30, dtype=torch.int)
    >>> find_dynamic([{"words": short, "labels": short}, {"words": long, "labels": long}])
    {'words': {1: 'length'}, 'labels': {1: 'length'}}

    Raises:
        BadInput: there are fewer than two batches, or they differ in more than sizes.
    """
    layouts = [layout_of(batch) for batch in batches]
    if len(layouts) < 2:
        raise BadInput(
            f"{len(layouts)} batch was given to find the dimensions that vary, which takes two of "
            "different lengths; give more, or declare them"
        )
    first = layouts[0]
    for number, layout in enumerate(layouts[1:], start=1):
        check_alike(first, layout, number)
    sizes: dict[tuple[int, int], tuple[int, ...]] = {}
    for leaf, spec in enumerate(first.leaves):
        for dim in range(1, len(spec.shape)):
            found = tuple(layout.leaves[leaf].shape[dim] for layout in layouts)
            if len(set(found)) > 1:
                sizes[leaf, dim] = found
    names = names_of(first, sizes)
    dynamic: dict[str | int | tuple[str | int, ...], dict[int, str]] = {}
    for leaf, path in enumerate(first.paths):
        dimensions = {dim: names[sizes[at, dim]] for at, dim in sizes if at == leaf}
        if dimensions:
            dynamic[path[0] if len(path) == 1 else path] = dimensions
    return dynamic


def check_alike(first: BatchLayout, other: BatchLayout, number: int) -> None:
    """Raise `BadInput` where batches differ in more than sizes."""
    pairs = list(zip(first.leaves, other.leaves, strict=False))
    if first.structure != other.structure or len(first.leaves) != len(other.leaves):
        raise BadInput(
            f"batch {number} is not made of the same entries as batch 0 ({told(other.leaves)} and "
            f"{told(first.leaves)}, constants included); let the loader yield batches alike"
        )
    for one, two in pairs:
        if len(one.shape) != len(two.shape) or one.dtype != two.dtype:
            raise BadInput(
                f"{one.name} has shape {two.shape} of {two.dtype} in batch {number} and "
                f"{one.shape} of {one.dtype} in batch 0; let the loader yield batches alike"
            )


def told(leaves: Iterable[LeafSpec]) -> str:
    """The names of tensors."""
    return ", ".join(leaf.name for leaf in leaves)


def names_of(
    layout: BatchLayout, sizes: dict[tuple[int, int], tuple[int, ...]]
) -> dict[tuple[int, ...], str]:
    """A name for each row of sizes: that of the first tensor with it, where there are several."""
    different = dict.fromkeys(sizes.values())
    if len(different) == 1:
        return {found: ONLY for found in different}
    paths, names = layout.paths, dict[tuple[int, ...], str]()
    for (leaf, dim), found in sizes.items():
        path = ".".join(map(str, paths[leaf]))
        own = [at for at in sizes if at[0] == leaf]
        names.setdefault(found, f"{path} {ONLY}" if len(own) == 1 else f"{path} {ONLY} {dim}")
    return names
