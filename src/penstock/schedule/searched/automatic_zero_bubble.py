"""The automatic zero-bubble search: split backwards for given times, within a memory limit."""

from collections.abc import Iterator
from dataclasses import replace

from penstock.errors import BadInput
from penstock.schedule.family import Family
from penstock.schedule.schedule import Schedule
from penstock.schedule.searched.list_search import quickest_order
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import excess

HANDCRAFTED = (
    "1f1b",
    "zb-h1",
    "zb-h2",
    "interleaved",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
    "dualpipe",
)
"""Families whose schedules are compared; those that need another placement are skipped."""

MOST_ATTEMPTS = 1_300


def zero_bubble(shape: PipelineShape) -> Schedule:
    """Split backwards, ordered for the pipeline's times and memory (Zero Bubble, ICLR 2024).

    Like the authors' automatic scheduler (section 3.1), this is a list scheduler that fills gaps
    with W within a memory limit. Unlike it, this one takes any placement and the times of each
    stage, and tries many policies (`penstock.schedule.searched.list_search`). The result is never
    slower than the handcrafted families that suit the placement and fit in memory.

    >>> print(zero_bubble(PipelineShape(stages=2, micro_batches=3)))
    stage 0   F0 F1 I0 W0 F2 I1 W1 I2 W2
    stage 1   F0 I0 F1 I1 W0 F2 I2 W1 W2

    If the shape limits neither memory nor micro-batches in flight, every group may hold what stage
    0 of 1F1B holds: as many micro-batches as there are groups.
    """
    if not shape.memory_bytes and not shape.in_flight_limit:
        shape = within_micro_batches(shape, shape.groups)
    return quickest_order(
        shape,
        split=True,
        others=fitting_schedules(HANDCRAFTED, shape),
        most_attempts=MOST_ATTEMPTS,
    )


def within_micro_batches(shape: PipelineShape, micro_batches: int) -> PipelineShape:
    """``shape`` with memory on each group for this number of micro-batches."""
    memory_bytes = tuple(
        micro_batches
        * max(
            sum(
                max(shape.cost(s).saved_bytes, shape.cost(s).bytes_until_weight_backward)
                for s in range(shape.stages)
                if way[s] == group
            )
            for way in shape.ways
        )
        for group in range(shape.groups)
    )
    return replace(shape, memory_bytes=memory_bytes)


def fitting_schedules(names: tuple[str, ...], shape: PipelineShape) -> Iterator[Schedule]:
    """The schedules of these families for ``shape``, as far as they exist and fit its limits."""
    # Imported here because the registry names this module.
    from penstock.schedule.registry import FAMILIES

    for name in names:
        if name in FAMILIES:
            try:
                schedule = FAMILIES[name].make(shape)
            except BadInput:
                continue
            if not excess(schedule, shape):
                yield schedule


ZERO_BUBBLE = Family(zero_bubble, splits=True, is_searched=True)
