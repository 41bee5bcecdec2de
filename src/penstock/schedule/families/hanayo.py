"""Hanayo: micro-batches pass the groups in waves, down and up again; each stage is held once."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.families.interleaved import Blocks, Numbers, even_blocks, short_blocks
from penstock.schedule.family import Family
from penstock.schedule.fitting import first_that_fits, stages_per_group
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.timetable import schedule_from_slots


def hanayo(shape: PipelineShape) -> Schedule:
    """Wave-like 1F1B on a folded pipeline of any number of rounds (Hanayo, SC 2023, section 3).

    A wave is two rounds: down the groups and up again. Micro-batches go in blocks of ``P``, the
    number of groups. The micro-batches of a block pass the first wave one after the other, then the
    next wave. Backwards do the same from the other end.

    >>> from penstock.schedule.shape import folded
    >>> print(hanayo(PipelineShape(stages=4, micro_batches=3, placement=folded(2, 2))))
    stage 0,3 0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2
    stage 1,2 1F0 2F0 1F1 2F1 2B0 1F2 1B0 2F2 2B1 1B1 2B2 1B2

    The paper gives the rule as a picture. Here it is given in cells, a cell being the time of one
    forward and one backward. In a wave that starts with cell 0, group ``d`` of ``P`` runs the
    forward down in cell ``d`` and the forward up in cell ``2 P - 1 - d``. The next micro-batch
    follows two cells later, so no two want the same cell. Backwards follow the same rule; the first
    one runs in the cell of the last forward. An odd number of rounds ends with a wave of three
    rounds: a micro-batch follows every three cells, and each round takes the first cell that is
    free.

    For ``W`` waves and at least ``P`` micro-batches the bubble is ``(P - 1) max(F, B) / W``, with F
    and B of all stages of a group; with ``F = B`` that is ``1 / (2 W)`` of the bubble of 1F1B. A
    group holds ``P`` micro-batches. With ``P`` micro-batches and ``B = 2 F`` the bubble is
    ``(2 P - 2) / (3 P W + 2 P - 2)`` of the iteration; the paper gives the slightly larger
    ``(2 P - 2) / (3 P W + P - 1)``.

    A number of micro-batches that is no multiple of ``P`` is split into blocks of ``P`` or a few
    more, and a group then holds a whole block. Where limits forbid that, blocks are of ``P``
    micro-batches and the last one holds the remainder. One round is 1F1B.
    """
    if stages_per_group(shape, "folded", "hanayo") == 1:
        return one_f_one_b(shape)
    blocks = (even_blocks, short_blocks)
    return first_that_fits("hanayo", shape, (waves_of_blocks(shape, of(shape)) for of in blocks))


def waves_of_blocks(shape: PipelineShape, blocks: Blocks) -> Schedule:
    """The order for these blocks: first the cells of all forwards, then of all backwards."""
    placement = shape.placement or (0,) * shape.stages
    there = cells_of_route(placement, shape.groups, blocks)
    back = cells_of_route(placement[::-1], shape.groups, blocks)[::-1]
    turn = int((there[-1] - back[-1]).max())
    return schedule_from_slots(shape, 2 * there, 2 * (back + turn) + 1)


def cells_of_route(route: Sequence[int], groups: int, blocks: Blocks) -> Numbers:
    """The cell of every micro-batch on each stage along the groups of ``route``, wave by wave."""
    rounds = len(route) // groups
    waves = [2] * (rounds // 2)
    waves[-1] += rounds % 2
    rows: list[Numbers] = []
    for begin, end in pairwise(accumulate(waves, initial=0)):
        start = blocks.begin + begin * blocks.width + (end - begin) * blocks.within
        cells = first_free_cells(route[begin * groups : end * groups], every=end - begin)
        rows += [start + cell for cell in cells]
    return np.stack(rows)


def first_free_cells(route: Sequence[int], every: int) -> list[int]:
    """Cells of one micro-batch that do not collide with the next one, ``every`` cells later.

    >>> first_free_cells([0, 1, 2, 2, 1, 0], every=2)
    [0, 1, 2, 3, 4, 5]
    """
    taken: set[tuple[int, int]] = set()
    cells: list[int] = []
    cell = 0
    for group in route:
        while (group, cell % every) in taken:
            cell += 1
        taken.add((group, cell % every))
        cells.append(cell)
        cell += 1
    return cells


HANAYO = Family(hanayo, "folded")
