"""From layers and devices of stages to a plan in which each fits, with recompute where it must."""

from collections.abc import Sequence
from typing import TypeAlias

from penstock.plan.cost import depth_function, device_memory_bytes
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem

__all__ = ["Assignment", "fitted_plan"]

Assignment: TypeAlias = tuple[range, tuple[int, ...], tuple[int, ...]]
"""Layers of a stage, its devices, and the rows of each."""


def fitted_plan(
    problem: PlanningProblem, assignments: Sequence[Assignment], schedule: str
) -> Plan | None:
    """The plan by a schedule; None where a stage does not fit at the depth of the schedule.

    Where the problem leaves recompute open, a stage recomputes only if it does not fit otherwise.
    """
    micro_batch_size = sum(assignments[0][2])
    micro_batches = problem.global_batch // micro_batch_size
    depth = depth_function(schedule)
    stages: list[Stage] = []
    for index, assignment in enumerate(assignments):
        in_flight = depth(len(assignments) - index, micro_batches)
        stage = fitted_stage(problem, assignment, in_flight)
        if stage is None:
            return None
        stages.append(stage)
    return Plan(tuple(stages), micro_batches, micro_batch_size, schedule)


def fitted_stage(problem: PlanningProblem, assignment: Assignment, in_flight: int) -> Stage | None:
    """The stage with recompute only where it must; None where it does not fit."""
    layers, devices, slices = assignment
    limits = [problem.cluster.devices[device].memory_bytes for device in devices]
    for recompute in problem.recompute_choices:
        if all(
            device_memory_bytes(problem, layers, rows, in_flight=in_flight, recompute=recompute)
            <= limit
            for rows, limit in set(zip(slices, limits, strict=True))
        ):
            return Stage(layers, devices, slices, recompute)
    return None
