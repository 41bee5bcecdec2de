"""Turns a concurrent schedule into one for devices that run one action at a time."""

from dataclasses import replace

from penstock.schedule.action import Action
from penstock.schedule.concurrent_clock import spans_side_by_side
from penstock.schedule.order import Order
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape

__all__ = ["one_at_a_time"]


def one_at_a_time(schedule: Schedule, shape: PipelineShape) -> Schedule:
    """Each group's actions in the order in which the concurrent clock starts them.

    A schedule that is not concurrent is returned as it is.

    >>> from penstock.schedule.families.bapipe_orders import fbp_as
    >>> from penstock.schedule.shape import StageCost
    >>> slow, quick = StageCost(2.0, 2.0, 2.0), StageCost(1.0, 1.0, 1.0)
    >>> shape = PipelineShape(stages=2, micro_batches=4, costs=(slow, quick))
    >>> print(fbp_as(shape))
    stage 0   F0 F1 F2 F3 B0 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    >>> print(one_at_a_time(fbp_as(shape), shape))
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3

    The result cannot deadlock: no dependency points back in time, and actions that start at the
    same moment keep the order of ``schedule``. A forward still follows all that preceded it, so no
    more micro-batches are in flight. Forwards and backwards each keep their order, so messages are
    received in the order in which they are sent. R is inserted again, right before its backward.
    """
    if not schedule.concurrent:
        return schedule
    # R belongs to its backward; the clock need not see it.
    spans = spans_side_by_side(without_recomputes(schedule), replace(shape, recompute=()))
    orders: list[Order] = []
    for order in schedule.orders:
        # The sort is stable.
        actions = sorted((a for a in order if a.kind != "R"), key=lambda action: spans[action][0])
        orders.append(with_recomputes(Order(actions), shape))
    return replace(schedule, orders=tuple(orders), concurrent=False)


def without_recomputes(schedule: Schedule) -> Schedule:
    """The same schedule without R."""

    def kept(order: Order) -> list[Action]:
        return [action for action in order if action.kind != "R"]

    return replace(schedule, orders=tuple(Order(kept(order)) for order in schedule.orders))
