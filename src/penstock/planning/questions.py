"""What is asked of a planner, from names and sizes as people give them."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import TypeVar

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, RecomputeChoice
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.registry import ASYNCHRONOUS, PROVEN_BY_SEARCH, SCHEDULES
from penstock.simulate.simulation import check_plan_fits_inputs

__all__ = [
    "named",
    "planning_problem",
    "problem_of_plan",
    "schedules_named",
    "synchronous_schedules",
]

Value = TypeVar("Value")

ANY = "any"
"""Instead of a schedule: whichever is the fastest of the synchronous ones."""


def named(registry: Mapping[str, Value], name: str, thing: str) -> Value:
    """The member of a registry by name.

    >>> named({"1f1b": 1, "gpipe": 2}, "gpipe", "schedule")
    2

    Raises:
        BadInput: there is none; says which was probably meant.
    """
    if name in registry:
        return registry[name]
    near = get_close_matches(name.lower(), registry, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "use one of those"
    raise BadInput(f"{thing} '{name}' is unknown; there are {', '.join(registry)}; {hint}")


def planning_problem(
    profile: ModelProfile,
    cluster: Cluster,
    batch: int,
    *,
    micro_batch_size: int = 0,
    schedule: str = "auto",
    recompute: RecomputeChoice = "auto",
    optimizer_bytes_per_parameter_byte: float = 2.0,
    max_stages: int = 0,
) -> PlanningProblem:
    """The question for a planner; ``micro_batch_size`` 0 tries every divisor of the batch.

    ``schedule`` "auto" leaves the choice among those that planners choose stages for, "any" among
    all that give the gradients of one device. ``max_stages`` 0 allows any number of stages.

    Raises:
        BadInput: an unknown schedule, or sizes that do not go together.
    """
    schedules = schedules_named(schedule)
    sizes = (micro_batch_size,) if micro_batch_size else divisors(batch)
    return PlanningProblem(
        profile=profile,
        cluster=cluster,
        global_batch=batch,
        micro_batch_sizes=sizes,
        optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte,
        recompute=recompute,
        schedules=schedules,
        max_stages=max_stages,
    )


def schedules_named(schedule: str) -> tuple[str, ...]:
    """The schedules that a plan may use where it is asked for ``schedule``.

    Raises:
        BadInput: an unknown schedule.
    """
    if schedule == "auto":
        return PlanningProblem.schedules
    if schedule == ANY:
        return tuple(dict.fromkeys((*PlanningProblem.schedules, *synchronous_schedules())))
    named({"auto": None, ANY: None, **SCHEDULES}, schedule, "schedule")
    return (schedule,)


def synchronous_schedules() -> tuple[str, ...]:
    """Every schedule that flushes before it updates weights, but for what searches for a proof."""
    return tuple(name for name in SCHEDULES if name not in ASYNCHRONOUS | PROVEN_BY_SEARCH)


def problem_of_plan(plan: Plan, profile: ModelProfile, cluster: Cluster) -> PlanningProblem:
    """The question that ``plan`` answers: any micro-batch size, planners' schedules and its own.

    Raises:
        BadInput: the plan does not fit to the profile or the cluster.
    """
    check_plan_fits_inputs(plan, profile, cluster)
    problem = planning_problem(profile, cluster, plan.global_batch)
    # The bound of the question must hold for the plan.
    return replace(problem, schedules=tuple(dict.fromkeys((*problem.schedules, plan.schedule))))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, largest first.

    >>> divisors(12)
    (12, 6, 4, 3, 2, 1)
    """
    return tuple(n for n in range(number, 0, -1) if number % n == 0)
