"""A planner's answer: a plan, found within a time limit where one is given."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from penstock.cluster.cluster import with_boundless_memory
from penstock.errors import Infeasible
from penstock.plan.cost_tables import whole_chain
from penstock.plan.infeasible import first_fitting, infeasible
from penstock.plan.pins import pins_text
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.pinned import pinned
from penstock.planning.planning_problem import member_named
from penstock.schedule.registry import FAMILIES
from penstock.search.families import rescheduled
from penstock.search.search import PLANNERS, STARTING_PLANNERS, search_steps
from penstock.search.simulated_plans import SearchStep
from penstock.simulate.score import make_score

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

    After the time limit the best plan so far is the answer. At least one plan that fits is found,
    however long that takes. ``on_step`` is called with every step.

    Raises:
        BadInput: no planner has the name.
        Infeasible: nothing fits; the message says what would. Or no plan of the planner keeps the
            pins.
    """
    member_named(PLANNERS, planner, "planner")
    if not problem.pins:
        return found_plan(problem, planner, score, limit, on_step)
    found: list[Plan] = []
    refused = Infeasible("no plan keeps the pins")
    with suppress(Infeasible):
        found += [pinned(problem, score)] if planner == "search" else []
    try:
        found.append(found_plan(problem, planner, score, limit, on_step))
    except Infeasible as refusal:
        refused = refusal
    if not found:
        raise pins_refused(problem, planner, refused)
    return min(found, key=score)


def pins_refused(problem: PlanningProblem, planner: str, refusal: Infeasible) -> Infeasible:
    """Why a planner found no plan: nothing fits at all, it cannot keep pins, or one is too much."""
    free = replace(problem, pins=())
    if first_fitting(free, whole_chain(free)) is None:
        return refusal
    if planner != "search":
        return Infeasible(
            f"planner '{planner}' proposes no plan that keeps {pins_text(problem.pins)}; use "
            f"planner 'search', or leave a pin out"
        )
    for pin in problem.pins:
        others = replace(problem, pins=tuple(other for other in problem.pins if other != pin))
        with suppress(Infeasible):
            if others.pins:
                pinned(others, make_score(others))
            return Infeasible(
                f"no plan that keeps pin '{pin.text}' fits in memory, and without it one does; "
                f"leave it out, or allow recompute or smaller micro-batches"
            )
    return Infeasible(
        f"no plan that keeps {pins_text(problem.pins)} fits in memory; leave some out"
    )


def found_plan(
    problem: PlanningProblem,
    planner: str,
    score: Score,
    limit: TimeLimit | None,
    on_step: Callable[[SearchStep], None] | None,
) -> Plan:
    """As `find_plan`.

    A published planner does not know all schedules. For the others, its plan for the schedules that
    it knows provides the devices (`penstock.search.families.rescheduled`).
    """
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
    starts = STARTING_PLANNERS | ({"pinned": pinned} if problem.pins else {})
    for step in search_steps(problem, limited, starts):
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
