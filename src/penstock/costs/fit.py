"""Plans that fit in memory, in which stages recompute where they must."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from penstock.costs.stage_costs import depths_of, device_memory_bytes
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem

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


def fitted_plans(
    problem: PlanningProblem, assignments: Sequence[Assignment], schedule: str
) -> Iterator[Plan]:
    """`fitted_plan`, and where memory limits it the plan of `as_deep_as_fits`, which keeps more."""
    plan = fitted_plan(problem, assignments, schedule)
    if plan is not None:
        yield plan
    if schedule == "early-backward":
        whole, by_block = problem.recompute_ways[0]
        stages = (replace(Stage(*each), recompute=whole, by_block=by_block) for each in assignments)
        size = sum(assignments[0][2])
        kept = Plan(tuple(stages), problem.global_batch // size, size, schedule)
        limited = as_deep_as_fits(problem, kept)
        if limited is not None and limited != plan:
            yield limited


def as_deep_as_fits(problem: PlanningProblem, plan: Plan) -> Plan | None:
    """The stages of a plan in the order 'early-backward', as deep as that and memory allow.

    Stage ``i`` of ``S`` warms up with ``K = min(2 (S - i) - 1, D)`` forwards, where ``D`` is the
    number of micro-batches that its devices hold (DAPPLE, PPoPP 2021). Here it also warms up with
    at least one less than the stage before it. With as many it would wait, in each turn, until that
    stage has ended a backward, sent it back and run another forward. None where a stage holds none.
    """
    plan = replace(plan, schedule="early-backward", in_flight_limit=())
    if plan_fits(problem, plan):
        return plan
    limits: list[int] = []
    for stage, deep in zip(plan.stages, depths_of(plan), strict=True):
        most = min(deep, max(1, limits[-1] - 1)) if limits else deep
        fitting = (depth for depth in range(most, 0, -1) if stage_fits(problem, stage, depth))
        limits.append(next(fitting, 0))
    return replace(plan, in_flight_limit=tuple(limits)) if min(limits) else None


def plan_fits(problem: PlanningProblem, plan: Plan) -> bool:
    """Return whether every device of a plan has the memory for its stage."""
    depths = zip(plan.stages, depths_of(plan), strict=True)
    return all(stage_fits(problem, stage, in_flight) for stage, in_flight in depths)


def with_needed_recompute(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with recompute where the problem requires it, or a stage does not fit without it.

    Of what a stage may do it does the first that fits, or else the last: keep its activations,
    recompute as a whole, recompute by block.
    """
    stages: list[Stage] = []
    for stage, in_flight in zip(plan.stages, depths_of(plan), strict=True):
        choices = [
            replace(stage, recompute=whole, by_block=by_block)
            for whole, by_block in problem.recompute_ways
        ]
        fitting = (one for one in choices[:-1] if stage_fits(problem, one, in_flight))
        stages.append(next(fitting, choices[-1]))
    return replace(plan, stages=tuple(stages))


def stage_fits(problem: PlanningProblem, stage: Stage, in_flight: int) -> bool:
    """Return whether all devices of a stage have memory for ``in_flight`` micro-batches."""
    limits = [problem.cluster.devices[device].memory_bytes for device in stage.devices]
    return all(
        device_memory_bytes(problem, stage, rows, in_flight) <= limit
        for rows, limit in set(zip(stage.slices, limits, strict=True))
    )
