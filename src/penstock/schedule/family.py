"""A schedule family: a function that makes orders, and the properties that other packages need."""

from dataclasses import dataclass

from penstock.schedule.schedule import ScheduleFunction
from penstock.schedule.shape import PipelineShape, PlacementStyle
from penstock.schedule.warm_up import DepthFunction, warm_up_depths


@dataclass(frozen=True, slots=True)
class Family:
    """One record for each family, in the file that makes its orders.

    - ``make`` gives the schedule for a shape; ``placement`` is the style of placement it needs.
    - ``rounds`` is the number of stages on each device group; 0: any number (one if straight).
    - ``splits``: backwards come as I and W.
    - ``flushes``: weights are updated at the end of an iteration, so gradients equal those of one
      device.
    - ``forwards_first``: the last stage has all its forwards before its first backward.
    - ``depth`` is given for families that planners can choose stages for: one stage a device, whole
      backwards, this many micro-batches in flight.
    - ``fills_limits``: where in-flight limits are given, stages are exactly as deep as these.
    - ``is_early_backward``: the order is that of `early_backward` with this ``depth``.
    - ``is_searched``: orders are searched for, given the costs and memory of the pipeline, for any
      placement.
    """

    make: ScheduleFunction
    placement: PlacementStyle = "straight"
    rounds: int = 0
    splits: bool = False
    flushes: bool = True
    forwards_first: bool = False
    depth: DepthFunction | None = None
    fills_limits: bool = False
    is_early_backward: bool = False
    is_searched: bool = False

    @property
    def is_planned(self) -> bool:
        """True if planners choose stages for it (see ``depth``)."""
        return self.depth is not None

    def depths(self, shape: PipelineShape) -> tuple[int, ...]:
        """Micro-batches in flight on each stage of ``shape``, for a family with a ``depth``."""
        assert self.depth is not None
        filled = self.fills_limits and shape.in_flight_limit
        return warm_up_depths(shape, (lambda _, batches: batches) if filled else self.depth)
