"""Micro-batches split into blocks that pass the rounds of a pipeline one after the other."""

from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.schedule.shape import PipelineShape

__all__ = ["Blocks", "Numbers", "even_blocks", "short_blocks"]

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """For every micro-batch: its index in its block, the block's width, and its first slot.

    A block takes ``width`` slots in each round, at least as many as there are groups: the first
    micro-batch of a block is back for the next round after that many slots.
    """

    within: Numbers
    width: Numbers
    begin: Numbers


def even_blocks(shape: PipelineShape) -> Blocks:
    """As many blocks as can hold one micro-batch a group; sizes differ by one, larger ones first.

    >>> blocks = even_blocks(PipelineShape(stages=2, micro_batches=5))
    >>> blocks.within.tolist(), blocks.width.tolist()
    ([0, 1, 2, 0, 1], [3, 3, 3, 2, 2])
    """
    blocks = max(1, shape.micro_batches // shape.groups)
    size, larger = divmod(shape.micro_batches, blocks)
    return blocks_of_sizes([size + 1] * larger + [size] * (blocks - larger), shape)


def short_blocks(shape: PipelineShape) -> Blocks:
    """Blocks of one micro-batch a group; the last block holds the remainder.

    >>> blocks = short_blocks(PipelineShape(stages=2, micro_batches=5))
    >>> blocks.within.tolist(), blocks.width.tolist()
    ([0, 1, 0, 1, 0], [2, 2, 2, 2, 2])
    """
    blocks, left = divmod(shape.micro_batches, shape.groups)
    return blocks_of_sizes([shape.groups] * blocks + [left] * (left > 0), shape)


def blocks_of_sizes(sizes: list[int], shape: PipelineShape) -> Blocks:
    """Blocks of these sizes in micro-batches, one after the other over all rounds of the shape."""
    rounds = shape.stages // shape.groups
    widths = [max(size, shape.groups) for size in sizes]
    begins = [rounds * begin for begin in accumulate(widths, initial=0)]
    return Blocks(
        within=np.concatenate([np.arange(size) for size in sizes]),
        width=np.repeat(widths, sizes),
        begin=np.repeat(begins[:-1], sizes),
    )
