"""Schedules that start backwards early; they differ only in the depth of the warm-up."""

import numpy as np

from penstock.errors import BadInput
from penstock.schedule.action import KIND_CODES
from penstock.schedule.family import Family
from penstock.schedule.order import Order, order_from_arrays
from penstock.schedule.recompute import with_recomputes
from penstock.schedule.schedule import Schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.warm_up import DepthFunction, most_in_flight, warm_up_depths

FORWARD, BACKWARD = KIND_CODES["F"], KIND_CODES["B"]


def gpipe(shape: PipelineShape) -> Schedule:
    """All forwards, then all backwards (GPipe, NeurIPS 2019).

    >>> print(gpipe(PipelineShape(stages=2, micro_batches=3)))
    stage 0   F0 F1 F2 B0 B1 B2
    stage 1   F0 F1 F2 B0 B1 B2

    GPipe runs the backwards in reverse order. Here they run in the order of the forwards, as in the
    rest of the family; time and memory are the same.
    """
    for stage in range(shape.stages):
        limit = most_in_flight(shape, stage)
        if limit < shape.micro_batches:
            raise BadInput(
                f"schedule 'gpipe' holds all {shape.micro_batches} micro-batches on stage {stage}, "
                f"whose in-flight limit is {limit}; use schedule '1f1b', recompute or at most "
                f"{limit} micro-batches"
            )
    return early_backward(shape, all_in_flight)


def one_f_one_b(shape: PipelineShape) -> Schedule:
    """As few micro-batches in flight as keep the pipeline full (DAPPLE, PPoPP 2021, policy P_A).

    >>> print(one_f_one_b(PipelineShape(stages=3, micro_batches=4)))
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3

    A stage that recomputes runs its forward again (R) before the backward, unless the forward has
    only just ended:

    >>> print(one_f_one_b(PipelineShape(stages=2, micro_batches=2, recompute=(True, True))))
    stage 0   F0 F1 R0 B0 R1 B1
    stage 1   F0 B0 F1 B1
    """
    return early_backward(shape, min)


def deep_early_backward(shape: PipelineShape) -> Schedule:
    """1F1B with a deeper warm-up, so that transfers do not keep a stage waiting.

    Without limits this is DAPPLE's policy P_B (PPoPP 2021), which counts every transfer as a stage:
    stage ``i`` of ``S`` starts with ``K = 2 (S - i) - 1`` forwards. With limits each stage is
    exactly as deep as its limit.

    >>> print(deep_early_backward(PipelineShape(stages=2, micro_batches=4)))
    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3
    >>> limited = PipelineShape(stages=2, micro_batches=4, in_flight_limit=(4, 2))
    >>> print(deep_early_backward(limited))
    stage 0   F0 F1 F2 F3 B0 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    """
    return early_backward(shape, all_in_flight if shape.in_flight_limit else deep_in_flight)


def all_in_flight(from_here: int, micro_batches: int) -> int:
    """In-flight depth of a stage in `gpipe`."""
    return micro_batches


def deep_in_flight(from_here: int, micro_batches: int) -> int:
    """In-flight depth of a stage in `deep_early_backward`, given the stages from it to the last."""
    return min(2 * from_here - 1, micro_batches)


def early_backward(shape: PipelineShape, depth: DepthFunction) -> Schedule:
    """Warm up with K forwards, then one backward, one forward, then drain (DAPPLE, PPoPP 2021).

        F(0) .. F(K-1)   B(0) F(K)  B(1) F(K+1) ..  B(M-1)

    The members of the family differ only in ``depth``, which gives K. The limits of the shape cap
    K, and a cap also holds for all later stages: a stage that waits for more
    forwards than the stage before it will send deadlocks.

    >>> limited = PipelineShape(stages=2, micro_batches=3, in_flight_limit=(1, 2))
    >>> print(early_backward(limited, lambda from_here, micro_batches: 2))
    stage 0   F0 B0 F1 B1 F2 B2
    stage 1   F0 B0 F1 B1 F2 B2
    """
    stage_of_group = {shape.group_of(stage): stage for stage in range(shape.stages)}
    if len(stage_of_group) != shape.stages or shape.groups != shape.stages or shape.mirrored:
        raise BadInput(
            f"{shape.stages} stages on device groups {list(shape.placement)}: an early-backward "
            f"schedule gives each group one stage; place every stage on its own group"
        )
    depths = warm_up_depths(shape, depth)
    return Schedule(
        tuple(
            order_of_stage(shape, stage, depths[stage])
            for _, stage in sorted(stage_of_group.items())
        )
    )


def order_of_stage(shape: PipelineShape, stage: int, depth: int) -> Order:
    """The order of one stage that keeps ``depth`` micro-batches in flight."""
    steady = np.arange(2 * shape.micro_batches)
    micro = np.concatenate([np.arange(depth), steady // 2 + depth * (steady % 2)])
    kinds = np.concatenate([np.full(depth, FORWARD), np.where(steady % 2, FORWARD, BACKWARD)])
    kept = micro < shape.micro_batches
    return with_recomputes(order_from_arrays(kinds[kept], stage, micro[kept]), shape)


GPIPE = Family(gpipe, forwards_first=True, depth=all_in_flight, is_early_backward=True)
ONE_F_ONE_B = Family(one_f_one_b, depth=min, is_early_backward=True)
EARLY_BACKWARD = Family(
    deep_early_backward, depth=deep_in_flight, fills_limits=True, is_early_backward=True
)
