"""Schedules on a V: every device group holds a stage on the way down and one on the way up.

A micro-batch runs F, F, I and I on the two stages of a group. These four are the *building block*.
It repeats every six slots: the time of the four and of their two W. The sum of the times between F
and W in the block, divided by six, is what a group holds on average. A group at the top of the V
holds a micro-batch long for its first stage and briefly for its second; a group at the turn holds
it equally long for both. So the sum is about the same for all groups (Pipeline Parallelism with
Controllable Memory, NeurIPS 2024).

Below, ``p`` is the number of groups. A slot is the time of F, I or W on one of the two stages, so a
micro-batch's work on a group is six slots. Peaks are in micro-batches of a group: each of its two
stages counts half of one, from F until W has run.

All raise `BadInput` where the placement is no V, or a group has no room for one micro-batch.
"""

from typing import TypeAlias

import numpy as np

from penstock.errors import BadInput
from penstock.schedule.families.zero_bubble_order import (
    Pattern,
    Rearrangement,
    Slots,
    schedule_of_pattern,
)
from penstock.schedule.family import Family
from penstock.schedule.fitting import stages_per_group
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

PERIOD = 6
"""Slots of a building block: F, I and W of two stages."""

ZB_V_REARRANGEMENTS = (Rearrangement(up=-9, down=-9, patient=True), Rearrangement(up=-9, down=-9))
V_HALF_REARRANGEMENTS = (
    Rearrangement(),
    Rearrangement(patient=True),
    Rearrangement(up=-9),
    Rearrangement(up=-9, down=9, patient=True),
    Rearrangement(down=9, patient=True),
)
V_MIN_REARRANGEMENTS = (
    Rearrangement(),
    Rearrangement(up=-9, deeper=1),
    Rearrangement(deeper=1, patient=True),
    Rearrangement(down=9, patient=True),
    Rearrangement(down=9, deeper=1, patient=True),
    Rearrangement(down=9, deeper=2),
)
"""Rearrangements that are tried. Together they come within half a percent of the best of 36,
averaged over seven ratios of F, I and W, with and without transfers, for 2 to 16 groups."""

FourSlots: TypeAlias = tuple[Slots, Slots, Slots, Slots]
"""Slots by group, then by micro-batch: F down, F up, I on the upward stage, I on the downward."""


def zb_v(shape: PipelineShape) -> Schedule:
    """No bubble, with the memory of 1F1B (Zero Bubble, ICLR 2024, ZB-V).

    >>> from penstock.schedule.shape import folded
    >>> print(zb_v(PipelineShape(stages=4, micro_batches=3, placement=folded(2, rounds=2))))
    stage 0,3 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    stage 1,2 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    The peak is ``p`` micro-batches. With ``F = I = W``, free transfers and ``M >= 2 p - 1`` no
    group waits between its first start and its last end. For any ``M`` the iteration takes the
    greatest of ``6 M + p - 1``, ``4 M + 3 p - 1`` and ``2 M + 4 p - 1`` slots. The first of these
    is a lower bound for every order on a V, since the last group starts after ``p - 1`` slots.

    Where costs differ or limits are tighter, rearrangements of this order are tried.
    """
    p, m = groups_of_v(shape, "zb-v"), np.arange(shape.micro_batches)
    r = np.arange(p)[:, np.newaxis]
    u = p - r
    # Group r with u = p - r: F down 2 u - 1 times; F up, F down r times; F up, I up u times. Then
    # it repeats F down, I down, F up, I up while micro-batches are left.
    steady = 2 * p - 1 + 2 * u
    down = np.where(m < 2 * u - 1, m, 2 * (m - u + 1))
    down = np.where(m < p + u - 1, down, steady + 4 * (m - p - u + 1))
    up = np.where(m < p, 2 * (u + m) - 1, steady + 4 * (m - p) + 2)
    from_up = np.where(m < u, 2 * (p + m), steady + 4 * (m - u) + 3)
    slots = by_stage((down, up, from_up, steady + 4 * m + 1))
    return schedule_of_pattern(
        shape, Pattern(slots, most=2 * p, rearrangements=ZB_V_REARRANGEMENTS)
    )


def v_half(shape: PipelineShape) -> Schedule:
    """Half of 1F1B's memory and half of its bubble (Controllable Memory, V-Half).

    >>> from penstock.schedule.shape import folded
    >>> print(v_half(PipelineShape(stages=4, micro_batches=3, placement=folded(2, rounds=2))))
    stage 0,3 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    stage 1,2 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    In the building block a micro-batch goes down a group every two slots and up a group every slot,
    both forward and backward. For even ``p`` three more slots at the turn separate blocks. The
    peak is ``p // 2 + 1`` micro-batches. With ``F = I = W``, free transfers and ``M >= p`` the
    iteration takes ``6 M + 3 p - 7`` slots for even ``p >= 4`` and ``6 M + 3 p - 4`` for odd
    ``p >= 3``; 1F1B takes ``6 M + 6 (p - 1)``. The blocks alone would take some ``3 p`` slots more:
    `rearranged` shortens the warm-up and the drain within the same peak.
    """
    groups_of_v(shape, "v-half")
    return schedule_of_pattern(shape, half_pattern(shape))


def half_pattern(shape: PipelineShape) -> Pattern:
    """The building blocks of V-Half one after the other."""
    p = shape.groups
    i = np.arange(p)[:, np.newaxis]
    turn = 0 if p % 2 else 3
    block = (2 * i, 3 * p - i - 2, 3 * p + turn + 2 * i - 1, 6 * p + turn - i - 2)
    slots = by_stage(repeated_slots(block, shape.micro_batches))
    return Pattern(slots, most=2 * (p // 2 + 1), rearrangements=V_HALF_REARRANGEMENTS)


def v_min(shape: PipelineShape) -> Schedule:
    """A third of 1F1B's memory and two thirds of its bubble (Controllable Memory, V-Min).

    >>> from penstock.schedule.shape import folded
    >>> print(v_min(PipelineShape(stages=8, micro_batches=3, placement=folded(4, rounds=2))))
    stage 0,7 0F0 0F1 7F0 7I0 0F2 7W0 7F1 7I1 0I0 7W1 0W0 7F2 7I2 0I1 7W2 0W1 0I2 0W2
    stage 1,6 1F0 6F0 1F1 6I0 6W0 6F1 1F2 1I0 6I1 1W0 6W1 6F2 1I1 6I2 1W1 6W2 1I2 1W2
    stage 2,5 2F0 5F0 2F1 5I0 5F1 5W0 2I0 2F2 2W0 5I1 5F2 5W1 2I1 2W1 5I2 5W2 2I2 2W2
    stage 3,4 3F0 4F0 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 4I2 3I2 4W2 3W2

    In the building block a micro-batch moves one group every slot, down and up, forward and
    backward. If 3 divides ``p``, two more slots at the turn separate blocks. The peak is
    ``(p + 1) // 3 + 1`` micro-batches. With ``F = I = W``, free transfers, ``p >= 3`` and
    ``M >= p`` the iteration takes ``6 M + 4 p - 7``, ``- 5`` or ``- 9`` slots, as ``p % 3`` is 0, 1
    or 2.

    Blocks this dense leave no slack: six F, or six I, of a block lie on one path from group to
    group, so each block takes six times the longer of F and I. Where these differ much,
    rearrangements help only if memory allows a higher peak; consider `v_half`. For ``p`` of 2, 3 or
    5 the blocks of V-Half hold no more and take no longer, so they are used instead.
    """
    p = groups_of_v(shape, "v-min")
    if p in (2, 3, 5):
        return schedule_of_pattern(shape, half_pattern(shape))
    i = np.arange(p)[:, np.newaxis]
    turn = 0 if p % 3 else 2
    block = (i, 2 * p - i - 1, 2 * p + turn + i, 4 * p + turn - i - 1)
    slots = by_stage(repeated_slots(block, shape.micro_batches))
    most = 2 * ((p + 1) // 3 + 1)
    return schedule_of_pattern(shape, Pattern(slots, most, rearrangements=V_MIN_REARRANGEMENTS))


def groups_of_v(shape: PipelineShape, name: str) -> int:
    """The number of device groups of a V."""
    if stages_per_group(shape, "folded", name) != 2:
        raise BadInput(
            f"schedule '{name}' with {shape.stages} stages on {shape.groups} device groups: its V "
            f"needs two stages a group, placed to and fro once, such as 0 1 2 2 1 0; cut the "
            f"layers into {2 * shape.groups} stages or choose schedule 'hanayo'"
        )
    return shape.groups


def repeated_slots(block: FourSlots, micro_batches: int) -> FourSlots:
    """The slots of all micro-batches, given those of the first."""
    shifts = PERIOD * np.arange(micro_batches)
    down, up, from_up, from_down = block
    return down + shifts, up + shifts, from_up + shifts, from_down + shifts


def by_stage(slots: FourSlots) -> Slots:
    """Slots of F and of I by stage, given those by group."""
    down, up, from_up, from_down = slots
    return np.array([np.concatenate([down, up[::-1]]), np.concatenate([from_down, from_up[::-1]])])


ZB_V = Family(zb_v, "folded", rounds=2, splits=True)
V_HALF = Family(v_half, "folded", rounds=2, splits=True)
V_MIN = Family(v_min, "folded", rounds=2, splits=True)
