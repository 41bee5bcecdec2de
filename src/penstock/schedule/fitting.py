"""Checks that a schedule suits the pipeline that it is made for: placement and limits."""

from penstock.errors import BadInput
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape, PlacementStyle, placement_of_style
from penstock.schedule.validate import excess

__all__ = ["checked_fit", "fits", "rounds_of"]

PLACES: dict[PlacementStyle, str] = {
    "straight": "one stage on each group, in their order",
    "looped": "round after round from the first group to the last, such as 0 1 2 0 1 2",
    "folded": "to and fro over the groups, such as 0 1 2 2 1 0",
    "mirrored": "every stage twice: a mirrored pipeline with one stage a group, in their order",
}


def rounds_of(shape: PipelineShape, style: PlacementStyle, schedule: str) -> int:
    """The number of stages on each group, if the placement is the one that ``schedule`` needs.

    >>> shape = PipelineShape(stages=4, micro_batches=1, placement=(0, 1, 1, 0))
    >>> rounds_of(shape, "folded", schedule="hanayo")
    2

    Raises:
        BadInput: the stages are placed differently.
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


def fits(schedule: Schedule, shape: PipelineShape) -> bool:
    """Whether every stage stays within its in-flight limit and every group within its memory."""
    return not excess(schedule, shape)


def checked_fit(schedule: Schedule, shape: PipelineShape, name: str) -> Schedule:
    """``schedule`` itself, if it stays within the limits of the shape.

    Raises:
        BadInput: a stage exceeds its in-flight limit, or a group its memory.
    """
    words = excess(schedule, shape)
    if words:
        raise BadInput(
            f"schedule '{name}' with {shape.micro_batches} micro-batches {words}; take fewer or "
            f"smaller micro-batches, recompute or choose a schedule that keeps fewer in flight"
        )
    return schedule
