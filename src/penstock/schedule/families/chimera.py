"""Chimera: two pipelines in opposite directions on the same device groups."""

import numpy as np

from penstock.schedule.family import Family
from penstock.schedule.fitting import first_that_fits, stages_per_group
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.timetable import schedule_from_slots


def chimera(shape: PipelineShape) -> Schedule:
    """1F1B in both directions at once, half of the micro-batches in each (Chimera, SC 2021, 3.1).

    >>> print(chimera(PipelineShape(stages=4, micro_batches=4, mirrored=True)))
    stage 0,3 0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2
    stage 1,2 1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2
    stage 1,2 1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3
    stage 0,3 0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3

    The picture shows the published unit: as many micro-batches as groups, ``D``, an even number.
    With ``F = B`` it idles for ``D - 2`` slots, where 1F1B idles for ``2 (D - 1)``. With
    ``B = 2 F`` it idles for ``2 (D - 2)`` times F. Each group holds ``D / 2 + 1`` to ``D``
    micro-batches of one stage.

    The paper concatenates units (section 3.5, direct concatenation). With ``F = B`` they fit
    without a gap, but with ``B = 2 F`` each further unit idles for ``D - 2`` times F. So here
    further micro-batches continue at the pace of the first ones. A cell is the time of a forward
    and a backward. Each direction starts one micro-batch every two cells, which runs its forward
    on stage ``s`` in the ``s``-th cell after its start, and its backward in cell
    ``2 (D - 1) - s``. Any number of units then idles as long as one, and all groups hold ``D``
    micro-batches. Direct concatenation is used where limits require it.

    The paper requires even ``D`` and full units; this schedule requires neither. For odd ``D`` one
    direction starts a cell later, so that no two forwards want the same cell.
    """
    stages_per_group(shape, "mirrored", "chimera")
    return first_that_fits("chimera", shape, (make(shape) for make in (steadily, in_units)))


def steadily(shape: PipelineShape) -> Schedule:
    """Each direction starts one micro-batch every two cells of a forward and a backward."""
    starts, direction = np.divmod(np.arange(shape.micro_batches), 2)
    starts = 2 * starts + direction * (shape.groups % 2)
    stages = np.arange(shape.stages)[:, None]
    forwards = starts + stages
    backwards = starts + 2 * (shape.stages - 1) - stages
    return schedule_from_slots(shape, 2 * forwards, 2 * backwards + 1)


def in_units(shape: PipelineShape) -> Schedule:
    """Units one after the other; a slot is the time of a forward or of a backward.

    In each direction of a unit, micro-batch ``j`` runs forward on stage ``s`` in slot ``2 j + s``
    and backward in slot ``2 j + 2 D - 1 - s``. For odd ``D`` units have one micro-batch more, and
    the direction that starts first waits two slots before its backwards.
    """
    odd = shape.groups % 2
    per_direction = (shape.groups + odd) // 2
    number, direction = np.divmod(np.arange(shape.micro_batches), 2)
    units, within = np.divmod(number, per_direction)
    # A unit keeps each group busy for one forward and one backward of each of its micro-batches.
    begins = 4 * per_direction * units + 2 * within + odd * direction
    stages = np.arange(shape.stages)[:, None]
    backwards = begins + 2 * shape.stages - 1 - stages + 2 * odd * (1 - direction)
    return schedule_from_slots(shape, begins + stages, backwards)


CHIMERA = Family(chimera, "mirrored")
