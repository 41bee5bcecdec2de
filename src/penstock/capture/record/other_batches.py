"""Batches of other sizes, made of the example: with more or fewer samples, and other lengths."""

from collections.abc import Iterator, Sequence

import torch

from penstock.capture.batch.layout import BatchLayout
from penstock.capture.batch.lengths import LengthsOf


def other_row_counts(samples: int) -> list[list[int]]:
    """Rows of two other batches: with one sample less, or more where norms could not take less."""
    if samples > 2:
        return [list(range(samples - 1)), list(range(1, samples))]
    every = list(range(samples))
    return [[*every, 0], [*every, samples - 1]]


def other_lengths(
    layout: BatchLayout, example: LengthsOf, *, jointly: bool
) -> Iterator[tuple[LengthsOf, bool]]:
    """Other lengths to record at, and whether the program must run there.

    Shorter ones, so that tables of positions suffice: one less; and about half of it, since sizes
    such as ``length // 8`` do not change with every length. Each length by itself, or all of them
    ``jointly`` by as much, for code that relates them.
    """
    if jointly:
        smallest = min(example)
        for step in (1, 2, smallest // 2) if smallest > 3 else (-1, -2):
            yield tuple(size - step for size in example), abs(step) == 1
        return
    for number, size in enumerate(example):
        least = max(layout.lengths[number].min, 1)
        one, half = (size - 1 if size > max(least, 2) else size + 1), (size + 1) // 2
        yield tuple(one if i == number else n for i, n in enumerate(example)), True
        if least <= half < one:
            yield tuple(half if i == number else n for i, n in enumerate(example)), False


def example_at_lengths(
    layout: BatchLayout, leaves: Sequence[torch.Tensor], lengths: LengthsOf
) -> list[torch.Tensor]:
    """The example at other lengths: its first entries, repeated if there are too few."""
    found: list[torch.Tensor] = []
    for leaf, spec in zip(leaves, layout.leaves, strict=True):
        for dim, number in spec.varying:
            places = torch.arange(lengths[number], device=leaf.device) % leaf.shape[dim]
            leaf = leaf.index_select(dim, places)
        found.append(leaf)
    return found
