"""The planned order of messages: one order of everything that ranks send in an iteration.

Every action is taken to last one unit of time. A message has the time of the action that sends it;
messages of the same time are in the order of their senders' ranks. Each rank issues its sends and
receives in this order. Then no rank waits for ever, even if all ranks share one communicator that
runs the operations of a rank strictly one after another, as NCCL's do. For the first message that
is not done can always be done: its sender's action needs earlier messages only, and everything that
either end has issued before it is done.

Real times differ from units, so a receive may be issued a little early or late. That costs time
only where a message could have arrived while its receiver still had to send an earlier one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from penstock.schedule.action import Action
from penstock.schedule.dependencies import predecessors
from penstock.schedule.shape import PipelineShape

AnyMessage = TypeVar("AnyMessage")


def unit_times(
    orders: Sequence[Sequence[Action]],
    shape: PipelineShape,
    units_of: Callable[[Action], int] = lambda action: 1,
) -> dict[Action, int]:
    """The start of each action, in units (`units_of`), if each starts as soon as it can.

    ``orders`` are those of all device groups. Actions that no order contains are taken as done
    before, so that the parts of an endless order can be given one after another.

    >>> from penstock.schedule.families.early_backward import one_f_one_b
    >>> shape = PipelineShape(stages=2, micro_batches=2)
    >>> times = unit_times(one_f_one_b(shape).orders, shape)
    >>> " ".join(f"{action}@{times[action]}" for action in sorted(times, key=times.__getitem__))
    '0F0@0 0F1@1 1F0@1 1B0@2 1F1@3 0B0@3 1B1@4 0B1@5'
    """
    contained = {action for order in orders for action in order}
    times: dict[Action, int] = {}
    places, free = [0] * len(orders), [0] * len(orders)
    while len(times) < len(contained):
        before = len(times)
        for group, order in enumerate(orders):
            while places[group] < len(order):
                action = order[places[group]]
                needed = [p for p in predecessors(action, shape) if p in contained]
                if any(p not in times for p in needed):
                    break
                start = max([free[group], *(times[p] + units_of(p) for p in needed)])
                times[action], free[group] = start, start + units_of(action)
                places[group] += 1
        if len(times) == before:
            raise ValueError("the actions of these orders wait for one another in a circle")
    return times


def in_planned_order(
    sent: Iterable[tuple[Action, int, AnyMessage]], times: dict[Action, int]
) -> tuple[AnyMessage, ...]:
    """Messages in the planned order, each given with its sending action and its sender's rank.

    Those that one action sends from one rank stay in the order in which they are given. A rank's
    own actions may be among them, each with a rank of -1: before all messages of its time.
    """
    ordered = sorted(sent, key=lambda entry: (times[entry[0]], entry[1]))
    return tuple(message for *_, message in ordered)
