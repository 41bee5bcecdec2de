"""Schedules: the actions of every device group, in order."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.errors import BadInput
from penstock.schedule.action import Action, parse_action
from penstock.schedule.order import Order
from penstock.schedule.shape import PipelineShape
from penstock.schedule.weight_rule import SYNCHRONOUS, WeightRule

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Schedule:
    """The ordered compute actions of one iteration, by device group.

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

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the orders on ``ax``, or on a new figure; returns the axes.

        A whole backward takes two seconds, every other action one, and a transfer none. A group
        does one thing at a time, even if the schedule is concurrent.
        """
        from penstock.schedule.unit_times import unit_timeline
        from penstock.timeline.plot import plot_timeline

        return plot_timeline(unit_timeline(self.orders), ax)

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


def parse_schedule(text: str) -> Schedule:
    """Parse the picture of a schedule: one line for each device group.

    >>> picture = "stage 0   F0 F1 B0 B1\\nstage 1   F0 B0 F1 B1"
    >>> str(parse_schedule(picture)) == picture
    True
    """
    lines = [line for line in text.splitlines() if line.strip()]
    return schedule_from_actions(parse_line(line) for line in lines)


def parse_line(line: str) -> tuple[Action, ...]:
    """The actions of one line; if it has a single stage, its actions do not repeat the stage."""
    match = re.fullmatch(r"\s*stage (\d+(?:,\d+)*)((?:\s.*)?)", line)
    if not match:
        raise BadInput(
            f"line '{line.strip()}' does not start with its stage or stages; write it like "
            f"'stage 0   F0 F1 B0 B1' or 'stage 0,2  0F0 2F0 2B0 0B0'"
        )
    stages, words = match.groups()
    prefix = "" if "," in stages else stages
    return tuple(parse_action(prefix + word) for word in words.split())
