"""Plans of published planners where stages may shard, or recompute by block.

No planner of a paper has these choices. So it plans for a problem in which every stage has made one
of them, and its plan is read as one that says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from penstock.costs.infeasible import ONE_STAGE_PLANNERS
from penstock.costs.sharding import with_sharding
from penstock.errors import BadInput, Infeasible
from penstock.plan.plan import Plan, with_recompute
from penstock.plan.problem import Planner, PlanningProblem, Score, dividing, in_blocks, score_of
from penstock.planners.data_parallel import dividing_plan
from penstock.planners.pinned import best_pinned
from penstock.planners.registry import STARTING_PLANNERS
from penstock.schedule.registry import FAMILIES

CHEAP = ("single-device", "data-parallel", "bapipe", "dapple", "spp")
"""The planners that `search` runs for every problem."""

MOST_PAIRS = 1600
"""Layers times devices up to which `search` runs `dapple` and `spp`: above that, they take longer
than the search itself."""


def plan_of_planner(name: str, make: Planner, problem: PlanningProblem, score: Score) -> Plan:
    """Return the plan of a planner whose stages all shard and recompute by block as required.

    Where stages may do so or not, they do not shard. They recompute by block if nothing else fits,
    and in plans of one stage if that is faster.
    """
    found, refusal = list[Plan](), None
    for blocks in sorted({by_block for _, by_block in problem.recompute_ways}):
        if found and name not in ONE_STAGE_PLANNERS:
            break
        try:
            found.append(plan_with(make, problem, score, blocks))
        except (Infeasible, BadInput) as error:
            refusal = refusal or error
    if not found:
        assert refusal
        raise refusal
    return min(found, key=lambda plan: score_of(plan, score))


def plan_with(make: Planner, problem: PlanningProblem, score: Score, blocks: bool) -> Plan:
    """Return the plan of a planner, with recompute by block on all stages or none."""
    view, reads = problem, list[Callable[[Plan], Plan]]()
    if problem.sharding in ("auto", "off"):
        view = replace(view, sharding="off")
    else:
        view = dividing(view, problem.sharding)
        reads.append(lambda plan: with_sharding(plan, problem.sharding))
    if blocks:
        view = in_blocks(view)
        reads.append(lambda plan: with_recompute(plan, False, by_block=True))

    def meant(plan: Plan) -> Plan:
        for read in reads:
            plan = read(plan)
        return plan

    return meant(make(view, lambda plan: score_of(meant(plan), score) if reads else score(plan)))


def known_schedules(problem: PlanningProblem) -> tuple[str, ...]:
    """Return the allowed schedules for which planners choose stages, or their own."""
    known = tuple(name for name in problem.schedules if name in PlanningProblem.schedules)
    known = known or tuple(name for name in problem.schedules if FAMILIES[name].is_planned)
    return known or PlanningProblem.schedules


def cheap_plans(problem: PlanningProblem, score: Score) -> Iterator[Plan]:
    """Return the plans of planners that take little time, and FSDP and ZeRO-1 on all devices."""
    pairs = len(problem.profile.layers) * len(problem.cluster.devices)
    names = [name for name in CHEAP if pairs <= MOST_PAIRS or name not in ("dapple", "spp")]
    yield from plans_of(problem, score, names)
    alone = problem.under(known_schedules(problem)[:1])
    for sharding in problem.shardings if problem.sharding == "auto" else ():
        if sharding:
            plan = dividing_plan(alone, lambda plan: score_of(plan, score), sharding)
            if plan:
                yield plan


def every_plan_of(problem: PlanningProblem, score: Score) -> Iterator[Plan]:
    """Return the plans of all planners; with pins, balanced plans that keep them."""
    if not problem.pins:
        yield from plans_of(problem, score, tuple(STARTING_PLANNERS))
        return
    for view in (problem.under(known_schedules(problem)), problem):
        with suppress(Infeasible):
            yield best_pinned(view, score)


def plans_of(problem: PlanningProblem, score: Score, names: Sequence[str]) -> Iterator[Plan]:
    """Return the plans of planners of these names that find one."""
    view = problem.under(known_schedules(problem))
    for name in names:
        with suppress(Infeasible, BadInput):
            plan = plan_of_planner(name, STARTING_PLANNERS[name], view, score)
            if score_of(plan, score) < inf:
                yield plan
