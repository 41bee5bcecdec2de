"""Orders that start a micro-batch's backward early: one family, told apart by one expression."""

from collections.abc import Callable
from itertools import accumulate
from typing import TypeAlias

from penstock.errors import BadInput
from penstock.schedule.action import Action
from penstock.schedule.schedule import PipelineShape, Schedule

__all__ = ["InFlight", "early_backward", "gpipe", "one_f_one_b"]

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
        if shape.limit(stage) < shape.micro_batches:
            raise BadInput(
                f"schedule 'gpipe' holds all {shape.micro_batches} micro-batches on stage {stage}, "
                f"whose in-flight limit is {shape.limit(stage)}; use schedule '1f1b', recompute or "
                f"at most {shape.limit(stage)} micro-batches"
            )
    return early_backward(shape, in_flight=lambda shape, stage: shape.micro_batches)


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
    return early_backward(shape, in_flight=lambda shape, stage: shape.stages - stage)


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
    if len(stage_of_group) != shape.stages or shape.groups != shape.stages:
        raise BadInput(
            f"{shape.stages} stages on device groups {list(shape.placement)}: an early-backward "
            f"schedule gives each group one stage; place every stage on its own group"
        )
    wanted = (min(in_flight(shape, s), shape.limit(s)) for s in range(shape.stages))
    depths = tuple(accumulate(wanted, min, initial=shape.micro_batches))[1:]
    return Schedule(
        tuple(
            order_of_stage(shape, stage, depths[stage])
            for _, stage in sorted(stage_of_group.items())
        )
    )


def order_of_stage(shape: PipelineShape, stage: int, depth: int) -> tuple[Action, ...]:
    """The work of one stage that keeps ``depth`` micro-batches in flight."""
    actions = [Action("F", stage, m) for m in range(depth)]
    for m in range(shape.micro_batches):
        just_ran = bool(actions) and actions[-1] == Action("F", stage, m)
        if shape.recomputes(stage) and not just_ran:
            actions.append(Action("R", stage, m))
        actions.append(Action("B", stage, m))
        if m + depth < shape.micro_batches:
            actions.append(Action("F", stage, m + depth))
    return tuple(actions)
