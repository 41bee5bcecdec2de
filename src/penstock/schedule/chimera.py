"""Chimera: two pipelines in opposite directions on the same device groups."""

import numpy as np

from penstock.schedule.fitting import checked_fit, rounds_of
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.timetable import schedule_from_slots

__all__ = ["chimera"]


def chimera(shape: PipelineShape) -> Schedule:
    """1F1B in both directions at once, half of the micro-batches each (Chimera, SC 2021, 3.1).

    >>> print(chimera(PipelineShape(stages=4, micro_batches=4, mirrored=True)))
    stage 0,3 0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2
    stage 1,2 1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2
    stage 1,2 1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3
    stage 0,3 0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3

    A unit is ``D`` micro-batches for an even number ``D`` of groups. The forward of number ``j``
    of one direction has slot ``2 j + s`` on stage ``s``, its backward slot ``2 j + 2 D - 1 - s``:
    no two share a slot of a group. One unit idles for ``D - 2`` slots with ``F = B``, and for
    ``2 (D - 2)`` times F with ``B = 2 F``, where 1F1B idles for ``D - 1`` times F and B. Longer
    iterations are units one after the other (section 3.5, direct concatenation). Those fit
    without a gap with ``F = B``; with ``B = 2 F`` every further unit idles for ``D - 2`` times F.
    A group holds ``D / 2 + 1`` to ``D`` micro-batches of one stage each.

    The paper asks for even ``D`` and for full units. Where the last unit is not full, what is
    missing is left out. For odd ``D`` a unit has ``D + 1`` micro-batches; one direction starts a
    slot later, and the backwards of the other two slots later, so that again no two share a slot.

    Raises:
        BadInput: the pipeline is not mirrored with one stage a group, or a limit cannot be kept.
    """
    rounds_of(shape, "mirrored", "chimera")
    odd = shape.groups % 2
    per_direction = (shape.groups + odd) // 2
    number, way = np.divmod(np.arange(shape.micro_batches), 2)
    units, within = np.divmod(number, per_direction)
    # A unit keeps each group busy for a forward and a backward of every micro-batch in it.
    begins = 4 * per_direction * units + 2 * within + odd * way
    stages = np.arange(shape.stages)[:, None]
    forwards = begins + stages
    backwards = begins + 2 * shape.stages - 1 - stages + 2 * odd * (1 - way)
    return checked_fit(schedule_from_slots(shape, forwards, backwards), shape, "chimera")
