"""Interleaved 1F1B: several chunks of the model on each device group, in rounds."""

import numpy as np

from penstock.schedule.families.blocks import Blocks, Numbers, even_blocks, short_blocks
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.family import Family
from penstock.schedule.fitting import checked_fit, fits, rounds_of
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.timetable import schedule_from_slots

__all__ = ["INTERLEAVED", "interleaved"]


def interleaved(shape: PipelineShape) -> Schedule:
    """1F1B over several chunks on each group (Megatron-LM, SC 2021, section 2.2).

    Micro-batches go in blocks of ``p``, the number of groups. A group runs one chunk for a whole
    block, then the next chunk; backwards take the chunks from the last to the first. With ``v``
    chunks a group, group ``r`` warms up with ``2 (p - 1 - r) + (v - 1) p`` forwards, then
    alternates.

    >>> from penstock.schedule.placement import looped
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

    Raises:
        BadInput: the placement is not looped, or a limit cannot be kept.
    """
    if rounds_of(shape, "looped", "interleaved") == 1:
        return checked_fit(one_f_one_b(shape), shape, "interleaved")
    for slots_per_hop in (2, 1):
        schedule = interleaved_in_blocks(shape, even_blocks(shape), slots_per_hop)
        if fits(schedule, shape):
            return schedule
    return checked_fit(
        interleaved_in_blocks(shape, short_blocks(shape), slots_per_hop=1), shape, "interleaved"
    )


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
