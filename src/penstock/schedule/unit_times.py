"""When actions run if each takes its unit of time; `penstock.schedule.clock` knows given costs."""

from collections import deque
from collections.abc import Sequence

from penstock.errors import BadInput
from penstock.schedule.action import Action
from penstock.schedule.dependencies import predecessors
from penstock.schedule.order import Order
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.timeline.timeline import Event, Timeline

__all__ = ["unit_timeline"]


def unit_timeline(orders: Sequence[Order]) -> Timeline:
    """Each action as early as possible: F, I, W and R take a second, B takes two.

    Device groups appear as devices, which do one thing at a time.

    Raises:
        BadInput: the orders deadlock.
    """
    present = {action for order in orders for action in order}
    stages = 1 + max((action.stage for action in present), default=0)
    shape = PipelineShape(stages, 1, recompute=(True,) * stages)
    cost, events = StageCost(), list[Event]()
    end_s: dict[Action, float] = {}
    free_s, queues = [0.0] * len(orders), [deque(order) for order in orders]
    while any(queues):
        before = len(events)
        for group, queue in enumerate(queues):
            while queue:
                action, needed = queue[0], present.intersection(predecessors(queue[0], shape))
                if not needed <= end_s.keys():
                    break
                start_s = max([free_s[group], *(end_s[one] for one in needed)])
                end_s[action] = free_s[group] = start_s + cost.seconds(action.kind)
                where = group, action.kind, action.stage, action.micro_batch
                events.append(Event(*where, start_s, end_s[action]))
                queue.popleft()
        if len(events) == before:
            raise BadInput("the schedule deadlocks; `validate` explains where")
    events.sort(key=lambda event: (event.start_s, event.device))
    return Timeline(tuple(events), len(orders))
