"""Chimera: two pipelines in opposite directions on the same device groups."""

import numpy as np

from penstock.schedule.family import Family
from penstock.schedule.fitting import checked_fit, fits, rounds_of
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.timetable import schedule_from_slots

__all__ = ["CHIMERA", "chimera"]


def chimera(shape: PipelineShape) -> Schedule:
    """1F1B in both directions at once, half of the micro-batches each (Chimera, SC 2021, 3.1).

    >>> print(chimera(PipelineShape(stages=4, micro_batches=4, mirrored=True)))
    stage 0,3 0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2
    stage 1,2 1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2
    stage 1,2 1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3
    stage 0,3 0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3

    This is the published unit: as many micro-batches as groups, ``D``, an even number. With ``F =
    B`` it idles for ``D - 2`` slots against ``2 (D - 1)`` of 1F1B, with ``B = 2 F`` for ``2 (D -
    2)`` times F. Groups hold ``D / 2 + 1`` to ``D`` micro-batches of one stage each.

    Units one after the other (section 3.5, direct concatenation) fit without a gap with ``F = B``,
    but with ``B = 2 F`` each further one idles for ``D - 2`` times F. So further micro-batches
    follow at the pace of the first ones instead: of each direction one in every two cells of a
    forward and a backward, the forward on stage ``s`` in cell ``s`` after its start and the
    backward in cell ``2 (D - 1) - s``. That unit after unit idles no longer than one, and all
    groups hold ``D`` micro-batches. Direct concatenation is for limits that ask for it.

    The paper asks for even ``D`` and full units; neither is needed here. For odd ``D`` one
    direction starts a cell later, so that again no two forwards want the same cell.

    Raises:
        BadInput: the pipeline is not mirrored with one stage a group, or a limit cannot be kept.
    """
    rounds_of(shape, "mirrored", "chimera")
    schedule = steadily(shape)
    if fits(schedule, shape):
        return schedule
    return checked_fit(in_units(shape), shape, "chimera")


def steadily(shape: PipelineShape) -> Schedule:
    """One micro-batch of each direction every two cells of a forward and a backward."""
    starts, way = np.divmod(np.arange(shape.micro_batches), 2)
    starts = 2 * starts + way * (shape.groups % 2)
    stages = np.arange(shape.stages)[:, None]
    forwards = starts + stages
    backwards = starts + 2 * (shape.stages - 1) - stages
    return schedule_from_slots(shape, 2 * forwards, 2 * backwards + 1)


def in_units(shape: PipelineShape) -> Schedule:
    """Units one after the other, in slots of a forward or a backward.

    Number ``j`` of one direction of a unit runs forward on stage ``s`` in slot ``2 j + s`` and
    backward in ``2 j + 2 D - 1 - s``. For odd ``D`` units have one micro-batch more; the direction
    that starts first then waits two slots before its backwards.
    """
    odd = shape.groups % 2
    per_direction = (shape.groups + odd) // 2
    number, way = np.divmod(np.arange(shape.micro_batches), 2)
    units, within = np.divmod(number, per_direction)
    # A unit keeps each group busy for a forward and a backward of every micro-batch in it.
    begins = 4 * per_direction * units + 2 * within + odd * way
    stages = np.arange(shape.stages)[:, None]
    backwards = begins + 2 * shape.stages - 1 - stages + 2 * odd * (1 - way)
    return schedule_from_slots(shape, begins + stages, backwards)


CHIMERA = Family(chimera, "mirrored")
