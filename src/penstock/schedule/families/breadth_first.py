"""Breadth-first schedule for looped pipelines: a group runs each chunk for all micro-batches."""

import numpy as np

from penstock.schedule.family import Family
from penstock.schedule.fitting import checked_fit, rounds_of
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.timetable import schedule_from_slots

__all__ = ["BREADTH_FIRST", "breadth_first"]


def breadth_first(shape: PipelineShape) -> Schedule:
    """Looped GPipe (Breadth-First Pipeline Parallelism, MLSys 2023, section 4.1).

    >>> from penstock.schedule.placement import looped
    >>> print(breadth_first(PipelineShape(stages=4, micro_batches=2, placement=looped(2, 2))))
    stage 0,2 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    stage 1,3 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    The bubble is that of interleaved 1F1B: ``(p - 1) (F + B) / v`` for ``v`` chunks on each of
    ``p`` groups and at least ``p`` micro-batches. Every group holds all micro-batches. In return
    the weights of a chunk are used in one go, and its gradients are complete early.
    Backwards run in the order of the forwards, as in `early_backward.gpipe`.

    Raises:
        BadInput: the placement is not looped, or a limit is below the number of micro-batches.
    """
    rounds_of(shape, "looped", "breadth-first")
    width = max(shape.groups, shape.micro_batches)
    chunks, ranks = np.divmod(np.arange(shape.stages)[:, None], shape.groups)
    forwards = chunks * width + ranks + np.arange(shape.micro_batches)
    return checked_fit(
        # The backwards pass the stages in the reverse order of the forwards.
        schedule_from_slots(shape, forwards, int(forwards.max()) + 1 + forwards[::-1]),
        shape,
        "breadth-first",
    )


BREADTH_FIRST = Family(breadth_first, "looped")
