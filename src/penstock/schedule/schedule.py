"""What every device group computes, in order."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.schedule.action import Action
from penstock.schedule.order import Order
from penstock.schedule.shape import PipelineShape
from penstock.schedule.weight_rule import SYNCHRONOUS, WeightRule

__all__ = ["Schedule", "ScheduleFunction", "schedule_from_actions"]


@dataclass(frozen=True)
class Schedule:
    """For each device group the ordered compute actions of one iteration.

    Communication is not part of a schedule: it follows from the order and the dependencies.

    If ``concurrent``, a group's forwards run beside its backwards, each in their order (BaPipe's
    FBP-AS). A forward waits for everything that precedes it; a backward does not wait for forwards.
    While both run they share the device in proportion to their work. ``weights`` says which weights
    each pass uses, for schedules without a flush.

    >>> print(schedule_from_actions([[Action("F", 0, 0), Action("B", 0, 0)], [Action("F", 1, 0)]]))
    stage 0   F0 B0
    stage 1   F0
    """

    orders: tuple[Order, ...]
    concurrent: bool = False
    weights: WeightRule = SYNCHRONOUS

    @property
    def actions(self) -> int:
        """The number of actions of all groups."""
        return sum(map(len, self.orders))

    def of(self, group: int) -> Order:
        """The actions of one device group, in order."""
        return self.orders[group]

    def __str__(self) -> str:
        return "\n".join(self._line(order) for order in self.orders)

    def _line(self, order: Order) -> str:
        stages = sorted({action.stage for action in order})
        single = len(stages) == 1
        words = (f"{a.kind}{a.micro_batch}" if single else str(a) for a in order)
        head = f"stage {','.join(map(str, stages))}"
        return f"{head:<9} {' '.join(words)}"


def schedule_from_actions(orders: Iterable[Iterable[Action]]) -> Schedule:
    """The schedule with these actions, group after group."""
    return Schedule(tuple(map(Order, orders)))


ScheduleFunction: TypeAlias = Callable[[PipelineShape], Schedule]
"""Makes the schedule of a family for the shape of a pipeline."""
