"""Orders from a timetable: every action has an integer slot, and groups run them by slot.

Most papers draw their schedules in equal slots. Given as slots, an order follows for any number of
micro-batches: a device group runs its actions in the order of their slots. If the slot of every
action is later than those of its dependencies, the order cannot deadlock, whatever the work really
takes, because an unfinished action of the earliest slot can always run.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import KIND_CODES
from penstock.schedule.order import order_from_arrays
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

Whole: TypeAlias = npt.NDArray[np.int64]

FORWARD, BACKWARD = KIND_CODES["F"], KIND_CODES["B"]


def schedule_from_slots(shape: PipelineShape, forwards: Whole, backwards: Whole) -> Schedule:
    """Every group's actions in the order of their slots; in the same slot backwards come first.

    ``forwards[stage, m]`` and ``backwards[stage, m]`` are the slots of micro-batch ``m``, at least
    0. They must increase along the dependencies of a micro-batch, and all stages must have the
    micro-batches in the same order (in each direction of a mirrored pipeline).

    >>> from penstock.schedule.action import Action
    >>> shape = PipelineShape(stages=2, micro_batches=2)
    >>> print(schedule_from_slots(shape, np.array([[0, 2], [1, 3]]), np.array([[3, 5], [2, 4]])))
    stage 0   F0 F1 B0 B1
    stage 1   F0 B0 F1 B1
    """
    cells = shape.stages * shape.micro_batches
    slots = np.concatenate([backwards.ravel(), forwards.ravel()])
    way_of = np.arange(shape.micro_batches) % len(shape.ways)
    groups = np.tile(np.array(shape.ways).T[:, way_of].ravel(), 2)
    # One number sorts by group, then slot; a stable sort keeps backwards before forwards.
    by_slot = np.argsort(groups * (int(slots.max()) + 1) + slots, kind="stable")
    kinds = np.where(by_slot < cells, BACKWARD, FORWARD)
    stages, micro_batches = np.divmod(by_slot % cells, shape.micro_batches)
    ends = np.cumsum(np.bincount(groups, minlength=shape.groups)).tolist()
    return schedule_of_groups(kinds, stages, micro_batches, ends, shape)


def schedule_of_groups(
    kinds: Whole, stages: Whole, micro_batches: Whole, ends: Sequence[int], shape: PipelineShape
) -> Schedule:
    """Actions group after group, up to each of ``ends``; with R where stages recompute."""
    return Schedule(
        tuple(
            with_recomputes(order_from_arrays(kinds[a:b], stages[a:b], micro_batches[a:b]), shape)
            for a, b in pairwise([0, *ends])
        )
    )
