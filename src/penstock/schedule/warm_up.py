"""The number of micro-batches in flight on a stage, which is that of its warm-up forwards."""

from collections.abc import Callable
from itertools import accumulate
from typing import TypeAlias

from penstock.errors import BadInput
from penstock.schedule.shape import ROUNDING, PipelineShape

DepthFunction: TypeAlias = Callable[[int, int], int]
"""Micro-batches in flight on a stage, from the numbers of stages left and of all micro-batches."""


def warm_up_depths(shape: PipelineShape, depth: DepthFunction) -> tuple[int, ...]:
    """Micro-batches in flight on each stage: ``depth``, within its limit and those upstream.

    >>> warm_up_depths(PipelineShape(stages=3, micro_batches=9), lambda left, batches: 2 * left - 1)
    (5, 3, 1)
    """
    wanted = (
        min(depth(shape.stages - s, shape.micro_batches), most_in_flight(shape, s))
        for s in range(shape.stages)
    )
    return tuple(accumulate(wanted, min, initial=shape.micro_batches))[1:]


def most_in_flight(shape: PipelineShape, stage: int) -> int:
    """The most micro-batches that a stage may hold, by its limit and its group's memory.

    >>> from penstock.schedule.shape import StageCost
    >>> half = StageCost(saved_bytes=0.5)
    >>> shape = PipelineShape(2, 8, costs=(half, half), memory_bytes=(2.0, 1.2))
    >>> [most_in_flight(shape, stage) for stage in (0, 1)]
    [4, 2]
    """
    saved = shape.cost(stage).saved_bytes
    if not shape.memory_bytes or saved <= 0:
        return shape.limit(stage)
    room = shape.memory_bytes[shape.group_of(stage)]
    fitting = room / saved * ROUNDING
    if fitting < 1:
        raise BadInput(
            f"stage {stage} saves {saved:.6g} bytes of a micro-batch and its device group has room "
            f"for {room:.6g}; recompute, or use smaller micro-batches or more stages"
        )
    return int(min(shape.limit(stage), fitting))
