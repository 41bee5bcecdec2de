"""Interleaved 1F1B: several chunks of the model on each device group, in rounds."""

from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.family import Family
from penstock.schedule.fitting import first_that_fits, stages_per_group
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.timetable import schedule_from_slots

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Index in its block, width of the block, and first slot, of every micro-batch.

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


def interleaved(shape: PipelineShape) -> Schedule:
    """1F1B over several chunks on each group (Megatron-LM, SC 2021, section 2.2).

    Micro-batches go in blocks of ``p``, the number of groups. A group runs one chunk for a whole
    block, then the next chunk; backwards take the chunks from the last to the first. With ``v``
    chunks a group, group ``r`` warms up with ``2 (p - 1 - r) + (v - 1) p`` forwards, then
    alternates.

    >>> from penstock.schedule.shape import looped
    >>> print(interleaved(PipelineShape(stages=4, micro_batches=4, placement=looped(2, 2))))
    stage 0,2 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    stage 1,3 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    The bubble is ``(p - 1) (F + B) / v`` for equal chunks, with F and B of all chunks of a group.
    The first group holds ``p + (p - 1) / v`` micro-batches. One chunk a group is 1F1B.

    Megatron-LM requires a multiple of ``p`` micro-batches. Other numbers are split as evenly as
    possible into blocks of at least ``p``, which keeps the bubble: with shorter blocks the first
    group would wait at the end of every chunk.

    Where limits forbid that warm-up, group ``r`` warms up with ``p - 1 - r + (v - 1) p`` forwards.
    Then no group holds more than ``p`` micro-batches, and the bubble stays the same as long as
    transfers take no time. Where even that is too much, all blocks but the last are of ``p``.
    """
    if stages_per_group(shape, "looped", "interleaved") == 1:
        return one_f_one_b(shape)
    ways = ((even_blocks, 2), (even_blocks, 1), (short_blocks, 1))
    orders = (interleaved_in_blocks(shape, blocks(shape), hop) for blocks, hop in ways)
    return first_that_fits("interleaved", shape, orders)


def interleaved_in_blocks(shape: PipelineShape, blocks: Blocks, slots_per_hop: int) -> Schedule:
    """The order for these blocks; a message takes one or two slots from group to group.

    Forward ``k`` of a group has slot ``2 k``, and backward ``k`` an odd slot between. Both shift by
    the hops from the group where they start. With two slots a hop a group warms up with one more
    forward for each group after it, which leaves time for transfers.
    """
    groups, rounds = shape.groups, shape.stages // shape.groups
    chunks, ranks = np.divmod(np.arange(shape.stages)[:, None], groups)

    def numbers(chunk: Numbers) -> Numbers:
        return blocks.begin + chunk * blocks.width + blocks.within

    last_hop = slots_per_hop * (groups - 1)
    first_backward = 2 * (rounds - 1) * int(blocks.width.max()) + last_hop + 1
    forwards = 2 * numbers(chunks) + slots_per_hop * ranks
    backwards = 2 * numbers(rounds - 1 - chunks) + first_backward + last_hop - slots_per_hop * ranks
    return schedule_from_slots(shape, forwards, backwards)


INTERLEAVED = Family(interleaved, "looped")


def breadth_first(shape: PipelineShape) -> Schedule:
    """Looped GPipe (Breadth-First Pipeline Parallelism, MLSys 2023, section 4.1).

    >>> from penstock.schedule.shape import looped
    >>> print(breadth_first(PipelineShape(stages=4, micro_batches=2, placement=looped(2, 2))))
    stage 0,2 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    stage 1,3 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    The bubble is that of interleaved 1F1B: ``(p - 1) (F + B) / v`` for ``v`` chunks on each of
    ``p`` groups and at least ``p`` micro-batches. Every group holds all micro-batches. In return
    the weights of a chunk are used in one go, and its gradients are complete early.
    Backwards run in the order of the forwards, as in `early_backward.gpipe`.
    """
    stages_per_group(shape, "looped", "breadth-first")
    width = max(shape.groups, shape.micro_batches)
    chunks, ranks = np.divmod(np.arange(shape.stages)[:, None], shape.groups)
    forwards = chunks * width + ranks + np.arange(shape.micro_batches)
    # The backwards pass the stages in the reverse order of the forwards.
    schedule = schedule_from_slots(shape, forwards, int(forwards.max()) + 1 + forwards[::-1])
    return first_that_fits("breadth-first", shape, [schedule])


BREADTH_FIRST = Family(breadth_first, "looped", forwards_first=True)
