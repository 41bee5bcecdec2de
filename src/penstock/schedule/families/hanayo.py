"""Hanayo: micro-batches pass the groups in waves, to and fro, each stage held once."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from penstock.schedule.families.blocks import Blocks, Numbers, even_blocks, short_blocks
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.family import Family
from penstock.schedule.fitting import checked_fit, fits, rounds_of
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.timetable import schedule_from_slots

__all__ = ["HANAYO", "hanayo"]


def hanayo(shape: PipelineShape) -> Schedule:
    """Wave-like 1F1B on a folded pipeline of any number of rounds (Hanayo, SC 2023, section 3).

    Two rounds, down the groups and up again, are a wave. A block of as many micro-batches as there
    are groups, ``P``, passes the first wave one after the other, then the next wave; backwards do
    the same from the other end.

    >>> from penstock.schedule.placement import folded
    >>> print(hanayo(PipelineShape(stages=4, micro_batches=3, placement=folded(2, 2))))
    stage 0,3 0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2
    stage 1,2 1F0 2F0 1F1 2F1 2B0 1F2 1B0 2F2 2B1 1B1 2B2 1B2

    The paper gives the rule as a picture; here it is in cells of one forward and one backward. In a
    wave that starts with cell 0, group ``d`` runs the forward down in cell ``d`` and the forward up
    in cell ``2 P - 1 - d``. The next micro-batch follows two cells later, so no two want the same
    cell. Backwards go the same way, the first in the cell of the last forward. An odd number of
    rounds ends with a wave of three, each in the first cell that is free in every third.

    For ``W`` waves the bubble is ``(P - 1) max(F, B) / W``, F and B being those of all stages of a
    group, for ``P`` micro-batches or more: a ``1 / (2 W)`` part of 1F1B's with ``F = B``. A group
    holds ``P`` micro-batches. With ``P`` micro-batches and ``B = 2 F`` the bubble is
    ``(2 P - 2) / (3 P W + 2 P - 2)`` of the iteration; published is
    ``(2 P - 2) / (3 P W + P - 1)``, a little more.

    What is no multiple of ``P`` is dealt into blocks of ``P`` or a few more, of which a group then
    holds as many; or, where limits ask for that, of ``P`` and what is left. One round is 1F1B.

    Raises:
        BadInput: the placement is not folded, or a limit cannot be kept.
    """
    if rounds_of(shape, "folded", "hanayo") == 1:
        return checked_fit(one_f_one_b(shape), shape, "hanayo")
    schedule = waves_of_blocks(shape, even_blocks(shape))
    if fits(schedule, shape):
        return schedule
    return checked_fit(waves_of_blocks(shape, short_blocks(shape)), shape, "hanayo")


def waves_of_blocks(shape: PipelineShape, blocks: Blocks) -> Schedule:
    """The order for these blocks: cells of the way there, and of the way back after that."""
    placement = shape.placement or (0,) * shape.stages
    there = cells_of_way(placement, shape.groups, blocks)
    back = cells_of_way(placement[::-1], shape.groups, blocks)[::-1]
    turn = int((there[-1] - back[-1]).max())
    return schedule_from_slots(shape, 2 * there, 2 * (back + turn) + 1)


def cells_of_way(way: Sequence[int], groups: int, blocks: Blocks) -> Numbers:
    """The cell of every micro-batch on every stage of a way over the groups, wave after wave."""
    rounds = len(way) // groups
    waves = [2] * (rounds // 2)
    waves[-1] += rounds % 2
    rows: list[Numbers] = []
    for begin, end in pairwise(accumulate(waves, initial=0)):
        start = blocks.begin + begin * blocks.width + (end - begin) * blocks.within
        cells = first_free_cells(way[begin * groups : end * groups], every=end - begin)
        rows += [start + cell for cell in cells]
    return np.stack(rows)


def first_free_cells(way: Sequence[int], every: int) -> list[int]:
    """Cells of one micro-batch that leave room for the next one ``every`` cells later.

    >>> first_free_cells([0, 1, 2, 2, 1, 0], every=2)
    [0, 1, 2, 3, 4, 5]
    """
    taken: set[tuple[int, int]] = set()
    cells: list[int] = []
    cell = 0
    for group in way:
        while (group, cell % every) in taken:
            cell += 1
        taken.add((group, cell % every))
        cells.append(cell)
        cell += 1
    return cells


HANAYO = Family(hanayo, "folded")
