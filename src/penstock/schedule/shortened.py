"""A schedule for a batch that has fewer micro-batches than planned."""

from dataclasses import replace

from penstock.schedule.action import KIND_CODES
from penstock.schedule.order import Order, order_from_arrays
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

__all__ = ["shortened"]

RECOMPUTE = KIND_CODES["R"]


def shortened(schedule: Schedule, shape: PipelineShape) -> Schedule:
    """``schedule`` without the micro-batches beyond those of ``shape``.

    The remaining actions keep their order. So the result cannot deadlock, messages keep their
    order, and no group holds more than before.

    >>> from penstock.schedule.families.early_backward import one_f_one_b
    >>> whole = one_f_one_b(PipelineShape(stages=3, micro_batches=8))
    >>> print(shortened(whole, PipelineShape(stages=3, micro_batches=4)))
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3
    """
    orders: list[Order] = []
    for order in schedule.orders:
        # R is inserted again: a backward may now directly follow its own forward.
        left = (order.micro_batches < shape.micro_batches) & (order.kinds != RECOMPUTE)
        kept = order_from_arrays(order.kinds[left], order.stages[left], order.micro_batches[left])
        orders.append(with_recomputes(kept, shape))
    return replace(schedule, orders=tuple(orders))
