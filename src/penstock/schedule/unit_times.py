"""Times of actions that each take their units; `penstock.schedule.clock` uses given costs."""

from collections.abc import Sequence

from penstock.errors import BadInput
from penstock.schedule.action import Action
from penstock.schedule.message_order import unit_times
from penstock.schedule.order import Order
from penstock.schedule.shape import PipelineShape
from penstock.timeline.timeline import Event, Timeline


def unit_timeline(orders: Sequence[Order]) -> Timeline:
    """Each action as early as possible: F, I, W and R take a second, B takes two.

    Device groups appear as devices, which do one thing at a time.
    """
    stages = 1 + max((action.stage for order in orders for action in order), default=0)
    shape = PipelineShape(stages, 1, recompute=(True,) * stages)

    def units_of(action: Action) -> int:
        return 2 if action.kind == "B" else 1

    try:
        times = unit_times(orders, shape, units_of)
    except ValueError:
        raise BadInput("the schedule deadlocks; `validate` explains where") from None
    events = (
        Event(group, a.kind, a.stage, a.micro_batch, float(times[a]), float(times[a] + units_of(a)))
        for group, order in enumerate(orders)
        for a in order
    )
    return Timeline(tuple(sorted(events, key=lambda e: (e.start_s, e.device))), len(orders))
