"""Orders that start a micro-batch's backward early: one family, told apart by one expression."""

from collections.abc import Callable
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from penstock.errors import BadInput
from penstock.schedule.action import KIND_CODES
from penstock.schedule.order import Order, order_from_arrays
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import ROUNDING, PipelineShape

__all__ = [
    "IN_FLIGHT",
    "InFlight",
    "deep_early_backward",
    "early_backward",
    "gpipe",
    "one_f_one_b",
    "warm_up_depths",
]

FORWARD, BACKWARD = KIND_CODES["F"], KIND_CODES["B"]

InFlight: TypeAlias = Callable[[PipelineShape, int], int]
"""The most micro-batches that a stage holds between their forward and their backward."""


def gpipe(shape: PipelineShape) -> Schedule:
    """All forwards, then all backwards (GPipe, NeurIPS 2019).

    >>> print(gpipe(PipelineShape(stages=2, micro_batches=3)))
    stage 0   F0 F1 F2 B0 B1 B2
    stage 1   F0 F1 F2 B0 B1 B2

    GPipe drains in reverse; here the backwards run in the order of the forwards, as in the rest
    of the family, which costs the same time and memory.

    Raises:
        BadInput: a stage may hold fewer micro-batches than there are.
    """
    for stage in range(shape.stages):
        limit = most_in_flight(shape, stage)
        if limit < shape.micro_batches:
            raise BadInput(
                f"schedule 'gpipe' holds all {shape.micro_batches} micro-batches on stage {stage}, "
                f"whose in-flight limit is {limit}; use schedule '1f1b', recompute or at most "
                f"{limit} micro-batches"
            )
    return early_backward(shape, in_flight=IN_FLIGHT["gpipe"])


def one_f_one_b(shape: PipelineShape) -> Schedule:
    """As few micro-batches in flight as keep the pipeline full (DAPPLE, PPoPP 2021, policy P_A).

    >>> print(one_f_one_b(PipelineShape(stages=3, micro_batches=4)))
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3

    A stage that recomputes runs its forward again (R) before the backward, except where the
    first forward has only just ended:

    >>> print(one_f_one_b(PipelineShape(stages=2, micro_batches=2, recompute=(True, True))))
    stage 0   F0 F1 R0 B0 R1 B1
    stage 1   F0 B0 F1 B1
    """
    return early_backward(shape, in_flight=IN_FLIGHT["1f1b"])


def deep_early_backward(shape: PipelineShape) -> Schedule:
    """Warmed up deeper than 1F1B, so that messages on their way do not keep a stage waiting.

    Without limits policy P_B of DAPPLE (PPoPP 2021), which counts every transfer as a stage of its
    own: ``K = 2 (S - i) - 1``. With limits each stage is exactly as deep as its limit says.

    >>> print(deep_early_backward(PipelineShape(stages=2, micro_batches=4)))
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3
    >>> limited = PipelineShape(stages=2, micro_batches=4, in_flight_limit=(4, 2))
    >>> print(deep_early_backward(limited))
    stage 0   F0 F1 F2 F3 B0 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    """
    return early_backward(shape, in_flight=IN_FLIGHT["early-backward"])


def deep_in_flight(shape: PipelineShape, stage: int) -> int:
    """The depth of one stage of `deep_early_backward`."""
    return shape.limit(stage) if shape.in_flight_limit else 2 * (shape.stages - stage) - 1


IN_FLIGHT: dict[str, InFlight] = {
    "gpipe": lambda shape, stage: shape.micro_batches,
    "1f1b": lambda shape, stage: shape.stages - stage,
    "early-backward": deep_in_flight,
}
"""The members of the family by the names of `penstock.schedule.registry`."""


def early_backward(shape: PipelineShape, in_flight: InFlight) -> Schedule:
    """Warm up with K forwards, then one backward, one forward, then drain (DAPPLE, section 1c).

        F(0) .. F(K-1)   B(0) F(K)  B(1) F(K+1) ..  B(M-1)

    ``in_flight(shape, stage)`` is the whole difference between the members of the family. The
    limits of the shape cap K, and a tighter cap is carried downstream: a stage that waits for
    more forwards than the stage before it will ever send deadlocks.

    >>> limited = PipelineShape(stages=2, micro_batches=3, in_flight_limit=(1, 2))
    >>> print(early_backward(limited, in_flight=lambda shape, stage: 2))
    stage 0   F0 B0 F1 B1 F2 B2
    stage 1   F0 B0 F1 B1 F2 B2

    Raises:
        BadInput: a device group holds several stages.
    """
    stage_of_group = {shape.group_of(stage): stage for stage in range(shape.stages)}
    if len(stage_of_group) != shape.stages or shape.groups != shape.stages or shape.mirrored:
        raise BadInput(
            f"{shape.stages} stages on device groups {list(shape.placement)}: an early-backward "
            f"schedule gives each group one stage; place every stage on its own group"
        )
    depths = warm_up_depths(shape, in_flight)
    return Schedule(
        tuple(
            order_of_stage(shape, stage, depths[stage])
            for _, stage in sorted(stage_of_group.items())
        )
    )


def warm_up_depths(shape: PipelineShape, in_flight: InFlight) -> tuple[int, ...]:
    """The most micro-batches that each stage holds: as wanted, within its limit and that upstream.

    >>> warm_up_depths(PipelineShape(stages=3, micro_batches=9), deep_in_flight)
    (5, 3, 1)
    """
    wanted = (min(in_flight(shape, s), most_in_flight(shape, s)) for s in range(shape.stages))
    return tuple(accumulate(wanted, min, initial=shape.micro_batches))[1:]


def most_in_flight(shape: PipelineShape, stage: int) -> int:
    """The most micro-batches that a stage may hold, by its limit and by its group's memory.

    >>> from penstock.schedule.shape import StageCost
    >>> half = StageCost(saved_bytes=0.5)
    >>> shape = PipelineShape(2, 8, costs=(half, half), memory_bytes=(2.0, 1.2))
    >>> [most_in_flight(shape, stage) for stage in (0, 1)]
    [4, 2]

    Raises:
        BadInput: there is no room for one.
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


def order_of_stage(shape: PipelineShape, stage: int, depth: int) -> Order:
    """The work of one stage that keeps ``depth`` micro-batches in flight."""
    steady = np.arange(2 * shape.micro_batches)
    micro = np.concatenate([np.arange(depth), steady // 2 + depth * (steady % 2)])
    kinds = np.concatenate([np.full(depth, FORWARD), np.where(steady % 2, FORWARD, BACKWARD)])
    kept = micro < shape.micro_batches
    return with_recomputes(order_from_arrays(kinds[kept], stage, micro[kept]), shape)
