"""A planner's answer: a plan, found within a time limit where one is given."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from penstock.bounds.lower_bound import lower_bound
from penstock.cluster.cluster import with_boundless_memory
from penstock.errors import BadInput, Infeasible
from penstock.plan.fitted_plan import with_needed_recompute
from penstock.plan.infeasible import ONE_STAGE_PLANNERS, infeasible
from penstock.plan.plan import Plan, with_recompute
from penstock.plan.problem import PlanningProblem, Score, in_blocks
from penstock.planning.planning_problem import member_named
from penstock.schedule.registry import FAMILIES
from penstock.search.families import rescheduled
from penstock.search.search import PLANNERS, STARTING_PLANNERS, search_steps
from penstock.search.simulated_plans import SearchStep, SimulatedPlans, climb
from penstock.simulate.score import make_score, predict_plan

NEARLY_FULL = 0.5
"""From this share of a device's memory on, a plan counts as limited by it: a micro-batch more, or
one twice as large, might not fit."""

QUICK = "dynamic-program"
"""The planner that `search` asks for plans by block if others fit. With `search` itself, planning
GNMT and Inception v3 on 16 V100 took twice as long, and no plan was faster by 0.1 %."""

ACTIONS_FOR_MIXED = 200_000
"""Simulated actions for moves among plans of which some stages recompute by block."""

__all__ = ["TimeLimit", "find_plan", "score_until"]


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Seconds that planning may take, and the clock that they are read from."""

    seconds: float
    clock: Callable[[], float]


def find_plan(
    problem: PlanningProblem,
    planner: str,
    score: Score,
    *,
    limit: TimeLimit | None = None,
    on_step: Callable[[SearchStep], None] | None = None,
) -> Plan:
    """What the planner of that name answers.

    Where stages may recompute by block, the planner is asked for plans that do so on all stages if
    nothing else fits. Plans of one stage are also tried so if memory is nearly full. `search` then
    tries those of a quick planner, and lets each stage recompute as it can.

    After the time limit the best plan so far is the answer. At least one plan that fits is found,
    however long that takes. ``on_step`` is called with every step.

    A published planner does not know all schedules. For the others, its plan for the schedules that
    it knows provides the devices (`penstock.search.families.rescheduled`).

    Raises:
        BadInput: no planner has the name.
        Infeasible: nothing fits; the message says what would.
    """
    member_named(PLANNERS, planner, "planner")
    if problem.blocks == "always":
        return by_block(problem, planner, score, limit, on_step)
    start_s, found, refusal = limit.clock() if limit else 0.0, list[Plan](), None
    try:
        found.append(kept_or_whole(problem, planner, score, limit, on_step))
    except Infeasible as error:
        refusal = error
    if not problem.allows_blocks or (found and not may_gain(problem, planner, found[0], score)):
        if refusal:
            raise refusal
        return found[0]
    if limit:
        limit = replace(limit, seconds=max(0.0, start_s + limit.seconds - limit.clock()))
        if found and not limit.seconds:
            return found[0]
    asked = QUICK if found and planner == "search" else planner
    with suppress(Infeasible, BadInput):
        found.append(by_block(problem, asked, score, limit, on_step))
    if not found:
        raise refusal or infeasible(problem, planner)
    simulated = SimulatedPlans(problem, score)
    for plan in found:
        simulated.simulate(plan)
        if FAMILIES[plan.schedule].is_planned:
            simulated.simulate(with_needed_recompute(problem, plan))
    if planner == "search" and simulated.best and not limit:
        climb(simulated, simulated.best, simulated.best_s, ACTIONS_FOR_MIXED)
    best = simulated.best or found[0]
    return replace(best, planner=planner)


def may_gain(problem: PlanningProblem, planner: str, plan: Plan, score: Score) -> bool:
    """Whether plans that recompute by block may be faster than ``plan``.

    They can be if memory limits it, and if no bound shows that they take longer.
    """
    if planner not in ("search", *ONE_STAGE_PLANNERS):
        return False
    if not any(stage.recompute for stage in plan.stages) and not is_full(problem, plan):
        return False
    return lower_bound(in_blocks(problem)).seconds < score(plan)


def is_full(problem: PlanningProblem, plan: Plan) -> bool:
    """Whether a device has less than `NEARLY_FULL` of its memory left."""
    prediction = predict_plan(problem, plan, with_timeline=False)
    peaks = zip(prediction.peak_memory_bytes, problem.cluster.devices, strict=True)
    return any(peak > NEARLY_FULL * device.memory_bytes for peak, device in peaks)


def by_block(
    problem: PlanningProblem,
    planner: str,
    score: Score,
    limit: TimeLimit | None,
    on_step: Callable[[SearchStep], None] | None,
) -> Plan:
    """The plan of a planner in which all stages recompute by block (`in_blocks`)."""

    def meant(plan: Plan) -> Plan:
        return with_recompute(plan, False, by_block=True)

    def shown(step: SearchStep) -> None:
        if on_step:
            on_step(replace(step, plan=meant(step.plan) if step.plan else None))

    blocks = in_blocks(problem)
    return meant(kept_or_whole(blocks, planner, lambda plan: score(meant(plan)), limit, shown))


def kept_or_whole(
    problem: PlanningProblem,
    planner: str,
    score: Score,
    limit: TimeLimit | None,
    on_step: Callable[[SearchStep], None] | None,
) -> Plan:
    """The answer of a planner without recompute by block; see `find_plan`."""
    others = [name for name in problem.schedules if not FAMILIES[name].is_planned]
    if planner == "search" or not others:
        return searched_plan(problem, planner, score, limit, on_step)
    known = tuple(name for name in problem.schedules if FAMILIES[name].is_planned)
    base = replace(problem, schedules=known or PlanningProblem.schedules)
    deadline_s = limit.clock() + limit.seconds if limit else inf
    limited = score_until(score, deadline_s, limit.clock) if limit else score
    # A plan of a schedule that is not allowed is never an answer, not even when time is up.
    first_on_step = on_step if known or on_step is None else without_plans(on_step)
    found: list[Plan] = []
    try:
        first = searched_plan(base, planner, score, limit, first_on_step)
        found += [first] if known else []
    except Infeasible:
        wide = replace(base, cluster=with_boundless_memory(base.cluster))
        first_on_step = without_plans(on_step) if on_step else None
        if limit:
            limit = replace(limit, seconds=max(0.0, deadline_s - limit.clock()))
        first = searched_plan(wide, planner, make_score(wide), limit, first_on_step)
    for name in others:
        best = min(found, key=score, default=None)
        if on_step:
            on_step(SearchStep(f"schedule {name}", best, score(best) if best else inf))
        if best and limit and limit.clock() > deadline_s:
            break
        plan = rescheduled(problem, first, name, limited)
        if plan is None and limit and not found:
            # The limit may have cut short the only schedule that fits.
            plan = rescheduled(problem, first, name, score)
        found += [plan] if plan else []
    if not found:
        raise infeasible(base, planner)
    return min(found, key=score)


def without_plans(on_step: Callable[[SearchStep], None]) -> Callable[[SearchStep], None]:
    """``on_step`` called without the plan of each step, only with what is being tried."""
    return lambda step: on_step(SearchStep(step.doing, None, inf))


def searched_plan(
    problem: PlanningProblem,
    planner: str,
    score: Score,
    limit: TimeLimit | None,
    on_step: Callable[[SearchStep], None] | None,
) -> Plan:
    """The plan of a planner that knows all schedules of the problem; see `find_plan`."""
    make = PLANNERS[planner]
    deadline_s = limit.clock() + limit.seconds if limit else inf
    limited = score_until(score, deadline_s, limit.clock) if limit else score
    if planner != "search":
        if on_step:
            on_step(SearchStep(f"planner {planner}", None, inf))
        return make(problem, limited)
    best: Plan | None = None
    for step in search_steps(problem, limited, STARTING_PLANNERS):
        best = step.plan
        if on_step:
            on_step(step)
        if limit and best is not None and limit.clock() >= deadline_s:
            return best
    if best is None:
        raise infeasible(problem, planner)
    return best


def score_until(score: Score, deadline_s: float, clock: Callable[[], float]) -> Score:
    """``score`` until the deadline; after it, infinite for plans that were not scored before.

    At least one plan that fits is scored, however long that takes. Plans are compared without
    their planners' names, because a planner may return the plan of another.
    """
    known: dict[Plan, float] = {}
    found = False

    def limited(plan: Plan) -> float:
        nonlocal found
        same = replace(plan, planner="")
        if same not in known:
            if found and clock() > deadline_s:
                return inf
            known[same] = score(plan)
            found = found or known[same] < inf
        return known[same]

    return limited
