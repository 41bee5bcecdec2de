"""Pipelines of equal stages in every style of placement, for tests of schedule families."""

from collections.abc import Iterator

from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape, PlacementStyle, StageCost, placement_of_style

UNIT = StageCost()
"""F = I = W = 1, B = 2."""


def placed(
    style: PlacementStyle, groups: int, micro_batches: int, rounds: int = 1, cost: StageCost = UNIT
) -> PipelineShape:
    """A pipeline of equal stages, ``rounds`` of them on each group."""
    placement = placement_of_style(style, groups, rounds)
    return PipelineShape(
        len(placement),
        micro_batches,
        placement=placement,
        costs=(cost,) * len(placement),
        mirrored=style == "mirrored",
    )


def every_small_shape(
    style: PlacementStyle, rounds: tuple[int, ...] = (1,)
) -> Iterator[PipelineShape]:
    """Up to six groups and thirteen micro-batches."""
    for groups in range(1, 7):
        for count in rounds:
            for micro_batches in range(1, 14):
                yield placed(style, groups, micro_batches, count)


def bubble_s(schedule: Schedule, shape: PipelineShape) -> float:
    """Idle seconds of a group over the iteration, where all groups have the same work."""
    work_s = sum(
        shape.cost(stage).forward_s + shape.cost(stage).backward_s for stage in range(shape.stages)
    )
    return makespan_s(schedule, shape) - work_s * shape.micro_batches / shape.groups


def most_held(schedule: Schedule, shape: PipelineShape) -> float:
    """Micro-batches that the fullest group holds, each of all its stages on that group."""
    per_group = len(shape.stages_of(0)) / (2 if shape.mirrored and shape.groups > 1 else 1)
    return max(memory_peaks_bytes(schedule, shape)) / (per_group * shape.cost(0).saved_bytes)
