"""Penstock's own list scheduler: whole backwards, adapted to unequal stages, links and memory."""

from penstock.schedule.clock import makespan_s
from penstock.schedule.family import Family
from penstock.schedule.schedule import Schedule
from penstock.schedule.searched.automatic_zero_bubble import fitting_schedules, within_micro_batches
from penstock.schedule.searched.list_search import quickest_order
from penstock.schedule.shape import PipelineShape

HANDCRAFTED = (
    "1f1b",
    "early-backward",
    "wavefront",
    "gpipe",
    "interleaved",
    "breadth-first",
    "hanayo",
    "chimera",
)
"""Families whose schedules are compared; those that need another placement are skipped."""

MOST_ATTEMPTS = 300


def list_schedule(shape: PipelineShape) -> Schedule:
    """Whole backwards, ordered for the pipeline's own times, transfers and memory.

    A list scheduler that tries many policies (`list_search`). Each stage warms up as deep as its
    times, its links and its memory suggest. It takes any placement. The result is never slower than
    the families with whole backwards that suit the placement and fit the limits.

    >>> limited = PipelineShape(stages=3, micro_batches=4, in_flight_limit=(2, 4, 4))
    >>> print(list_schedule(limited))
    stage 0   F0 F1 B0 F2 B1 F3 B2 B3
    stage 1   F0 F1 B0 B1 F2 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3

    If the shape limits neither memory nor micro-batches in flight, every group may hold as many
    micro-batches as there are groups, as in 1F1B; or twice as many if that is faster, for example
    with slow transfers.
    """
    if shape.memory_bytes or shape.in_flight_limit:
        return quickest_list(shape)
    tight, wide = (
        quickest_list(within_micro_batches(shape, times * shape.groups)) for times in (1, 2)
    )
    quicker = makespan_s(wide, shape) < makespan_s(tight, shape) * (1 - 1e-9)
    return wide if quicker else tight


def quickest_list(shape: PipelineShape) -> Schedule:
    """The fastest schedule with whole backwards that was found."""
    return quickest_order(
        shape,
        split=False,
        others=fitting_schedules(HANDCRAFTED, shape),
        most_attempts=MOST_ATTEMPTS,
    )


LIST = Family(list_schedule, is_searched=True)
