"""What a schedule family is: how its orders are made, and all that others ask about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.schedule.placement import PlacementStyle
from penstock.schedule.schedule import ScheduleFunction
from penstock.schedule.warm_up import InFlight

__all__ = ["DepthFunction", "Family"]

DepthFunction: TypeAlias = Callable[[int, int], int]
"""Micro-batches in flight, from the stages from here to the end and the micro-batches."""


@dataclass(frozen=True, slots=True)
class Family:
    """One record for each family, in the file that makes its orders.

    ``rounds`` is how many stages it places on each device group: 0 for as many as wanted, where
    the placement has several. ``splits`` says that backwards come in halves, I and W; ``flushes``
    that weights are updated at the end of an iteration, so that gradients are those of one device;
    ``proves`` that it searches for a proof, which ends in time on small pipelines only.

    ``depth`` is for planners, which choose stages for whole backwards, one stage a device, by how
    many micro-batches each holds. ``in_flight`` is given where the order is that of
    `penstock.schedule.families.early_backward.early_backward` with it. ``stand_ins`` are for
    families that take any placement and search long: the placements worth a try, each with the
    family whose orders stand in while stages are still being moved.
    """

    make: ScheduleFunction
    placement: PlacementStyle = "straight"
    rounds: int = 0
    splits: bool = False
    flushes: bool = True
    proves: bool = False
    depth: DepthFunction | None = None
    in_flight: InFlight | None = None
    stand_ins: Mapping[PlacementStyle, str] = field(default_factory=dict[PlacementStyle, str])

    @property
    def is_planned(self) -> bool:
        """Whether planners choose stages for it: whole backwards and one stage a device."""
        return self.depth is not None

    @property
    def is_searched(self) -> bool:
        """Whether its orders are searched for, for the costs and memory of the pipeline."""
        return bool(self.stand_ins)
