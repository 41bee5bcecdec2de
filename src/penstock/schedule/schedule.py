"""What every device group computes, in order; the shape of pipeline that orders are made for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.schedule.action import Action

__all__ = ["PipelineShape", "Schedule", "ScheduleFunction"]


@dataclass(frozen=True)
class PipelineShape:
    """All that a schedule function needs to know of a pipeline.

    The replicas of a stage play the same order side by side: together they are a *device group*.
    ``placement[stage]`` is the group that holds the stage (empty: group ``s`` holds stage ``s``).
    ``in_flight_limit[stage]`` is the most micro-batches whose saved activations fit (empty: no
    limit). ``recompute[stage]`` says that the stage's forward runs again before its backward.
    ``forward_s`` and ``backward_s`` are times of a micro-batch, for orders that adapt to them
    (empty: all equal).
    """

    stages: int
    micro_batches: int
    placement: tuple[int, ...] = ()
    in_flight_limit: tuple[int, ...] = ()
    recompute: tuple[bool, ...] = ()
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()

    @property
    def groups(self) -> int:
        """The number of device groups."""
        return max(self.placement) + 1 if self.placement else self.stages

    def group_of(self, stage: int) -> int:
        """The device group that holds ``stage``."""
        return self.placement[stage] if self.placement else stage

    def limit(self, stage: int) -> int:
        """The most micro-batches that may be in flight on ``stage``."""
        return self.in_flight_limit[stage] if self.in_flight_limit else self.micro_batches

    def recomputes(self, stage: int) -> bool:
        """Whether ``stage`` keeps only its inputs and runs its forward again."""
        return bool(self.recompute) and self.recompute[stage]


@dataclass(frozen=True)
class Schedule:
    """For each device group the ordered compute actions of one iteration.

    Communication is derived from this order (`penstock.schedule.dependencies`), never written.

    >>> print(Schedule(((Action("F", 0, 0), Action("B", 0, 0)), (Action("F", 1, 0),))))
    stage 0   F0 B0
    stage 1   F0
    """

    orders: tuple[tuple[Action, ...], ...]

    def of(self, group: int) -> tuple[Action, ...]:
        """The actions of one device group, in order."""
        return self.orders[group]

    def __str__(self) -> str:
        return "\n".join(self._line(order) for order in self.orders)

    def _line(self, order: tuple[Action, ...]) -> str:
        stages = sorted({action.stage for action in order})
        single = len(stages) == 1
        words = (f"{a.kind}{a.micro_batch}" if single else str(a) for a in order)
        head = f"stage {','.join(map(str, stages))}"
        return f"{head:<9} {' '.join(words)}"


ScheduleFunction: TypeAlias = Callable[[PipelineShape], Schedule]
"""A schedule family: from the shape of a pipeline to the order of its work."""
