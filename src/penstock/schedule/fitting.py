"""Checks that a schedule suits the pipeline that it is made for: placement and limits."""

from collections.abc import Iterable, Sequence

from penstock.errors import BadInput
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import (
    ROUNDING,
    PipelineShape,
    PlacementStyle,
    placement_of_style,
)
from penstock.schedule.validate import excess

PLACES: dict[PlacementStyle, str] = {
    "straight": "one stage on each group, in their order",
    "looped": "round after round from the first group to the last, such as 0 1 2 0 1 2",
    "folded": "to and fro over the groups, such as 0 1 2 2 1 0",
    "mirrored": "every stage twice: a mirrored pipeline with one stage a group, in their order",
}


def stages_per_group(shape: PipelineShape, style: PlacementStyle, schedule: str) -> int:
    """The number of stages on each group, if the placement is the one that ``schedule`` needs.

    >>> shape = PipelineShape(stages=4, micro_batches=1, placement=(0, 1, 1, 0))
    >>> stages_per_group(shape, "folded", schedule="hanayo")
    2
    """
    rounds = shape.stages // shape.groups
    placement = shape.placement or tuple(range(shape.stages))
    mirrored = style == "mirrored"
    if placement == placement_of_style(style, shape.groups, rounds) and shape.mirrored == mirrored:
        return rounds
    raise BadInput(
        f"schedule '{schedule}' with {shape.stages} stages on device groups {list(placement)}"
        f"{', mirrored' if shape.mirrored else ''}: it needs a {style} placement, "
        f"{PLACES[style]}; place the stages so or choose another schedule"
    )


def check_room(
    shape: PipelineShape, saved_bytes: Sequence[float] = (), slack: float = ROUNDING
) -> None:
    """Raise `BadInput` unless one micro-batch fits within all limits by itself.

    ``saved_bytes`` are those of each stage, if not what its costs say. Memory counts as ``slack``
    times as large.
    """
    for stage in range(shape.stages):
        if shape.limit(stage) < 1:
            raise BadInput(
                f"stage {stage} has an in-flight limit of {shape.limit(stage)}; allow at least one "
                f"micro-batch"
            )
    saved = saved_bytes or [shape.cost(stage).saved_bytes for stage in range(shape.stages)]
    for group_of in shape.ways[: shape.micro_batches]:
        for group, limit_bytes in enumerate(shape.memory_bytes):
            needed = sum(own for own, g in zip(saved, group_of, strict=True) if g == group)
            if needed > limit_bytes * slack:
                raise BadInput(
                    f"one micro-batch saves {needed:.6g} bytes on the stages of device group "
                    f"{group}, which has room for {limit_bytes:.6g}; use smaller micro-batches, "
                    f"recompute, or more stages"
                )


def first_that_fits(name: str, shape: PipelineShape, schedules: Iterable[Schedule]) -> Schedule:
    """The first of the ``schedules`` of a family that stays within the limits of the shape."""
    words = ""
    for schedule in schedules:
        words = excess(schedule, shape)
        if not words:
            return schedule
    raise BadInput(
        f"schedule '{name}' with {shape.micro_batches} micro-batches {words}; take fewer or "
        f"smaller micro-batches, recompute or choose a schedule that keeps fewer in flight"
    )
