"""Plans that fit in memory, in which stages recompute where they must."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from penstock.plan.cost import depths_of, device_memory_bytes
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem

__all__ = ["Assignment", "fitted_plan", "plan_fits", "with_needed_recompute"]

Assignment: TypeAlias = tuple[range, tuple[int, ...], tuple[int, ...]]
"""Layers of a stage, its devices, and the rows of each."""


def fitted_plan(
    problem: PlanningProblem, assignments: Sequence[Assignment], schedule: str
) -> Plan | None:
    """The plan by a schedule; None where a stage does not fit at the depth of the schedule.

    Where the problem leaves recompute open, a stage recomputes only if it does not fit otherwise.
    """
    stages = tuple(Stage(*assignment) for assignment in assignments)
    size = sum(stages[0].slices)
    plan = Plan(stages, problem.global_batch // size, size, schedule)
    plan = with_needed_recompute(problem, plan)
    return plan if plan_fits(problem, plan) else None


def plan_fits(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether every device of a plan has the memory for its stage."""
    depths = zip(plan.stages, depths_of(plan), strict=True)
    return all(stage_fits(problem, stage, in_flight) for stage, in_flight in depths)


def with_needed_recompute(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with recompute where the problem requires it, or a stage does not fit without it."""
    least, most = min(problem.recompute_choices), max(problem.recompute_choices)
    stages: list[Stage] = []
    for stage, in_flight in zip(plan.stages, depths_of(plan), strict=True):
        kept = replace(stage, recompute=least)
        enough = least == most or stage_fits(problem, kept, in_flight)
        stages.append(kept if enough else replace(stage, recompute=most))
    return replace(plan, stages=tuple(stages))


def stage_fits(problem: PlanningProblem, stage: Stage, in_flight: int) -> bool:
    """Whether all devices of a stage have the memory for so many micro-batches in flight."""
    limits = [problem.cluster.devices[device].memory_bytes for device in stage.devices]
    return all(
        device_memory_bytes(
            problem, stage.layers, rows, in_flight=in_flight, recompute=stage.recompute
        )
        <= limit
        for rows, limit in set(zip(stage.slices, limits, strict=True))
    )
