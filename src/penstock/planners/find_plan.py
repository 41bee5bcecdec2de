"""A planner's answer: a plan, found within a time limit where one is given."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from penstock.cluster.cluster import with_boundless_memory
from penstock.costs.infeasible import first_fitting, infeasible
from penstock.costs.tables import whole_chain
from penstock.errors import BadInput, Infeasible
from penstock.plan.pins import pins_text
from penstock.plan.plan import Plan, StateOn, with_state_on
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.problem import member_named
from penstock.planners.search.judge import SearchStep
from penstock.planners.search.search import PLANNERS, rescheduled, search
from penstock.planners.tensor_groups import groupings, plan_with_groups
from penstock.planners.variants import plan_of_planner
from penstock.schedule.registry import FAMILIES
from penstock.simulate.score import make_score
from penstock.text import size_text


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
    sizes: Sequence[int] = (),
    limit: TimeLimit | None = None,
    effort: float = 1.0,
    on_step: Callable[[SearchStep], None] | None = None,
) -> Plan:
    """Return what the planner of that name proposes.

    `search` lets every stage recompute and shard as it can. Published planners lack these
    choices; `penstock.planners.variants` says when they are tried all the same. They also lack some
    schedules: for those, their plan for the schedules that they support provides the devices
    (`penstock.planners.search.search.rescheduled`).

    ``effort`` multiplies what `search` may simulate. After the time limit the best plan so far is
    the answer. At least one plan that fits is found, however long that takes. ``on_step`` is called
    with every step. The plan may have tensor groups of the ``sizes``, if any (`plan_with_groups`).
    All ways to divide the cluster share the time limit equally, and only the steps without groups
    are reported.
    """
    member_named(PLANNERS, planner, "planner")
    if problem.state_on != "device":
        places, found = problem.places, list[Plan]()
        part = replace(limit, seconds=limit.seconds / len(places)) if limit else None
        for place in places:

            def scored(plan: Plan, place: StateOn = place) -> float:
                return score(with_state_on(plan, place))

            try:
                if place == "host":
                    check_hosts(problem)
                own = problem.with_state_on(place)
                plan = find_plan(
                    own, planner, scored, sizes=sizes, limit=part, effort=effort, on_step=on_step
                )
                found.append(with_state_on(plan, place))
            except Infeasible:
                if place == places[-1] and not found:
                    raise
        return min(found, key=score)
    if sizes:
        check_groups(problem)
        ways = sum(1 for _ in groupings(problem.cluster, sizes))
        part = replace(limit, seconds=limit.seconds / ways) if limit else None

        def find(view: PlanningProblem, own: Score) -> Plan:
            listener = on_step if view is problem else None
            view = view if view is problem else replace(view, sharding="off")
            return find_plan(view, planner, own, limit=part, effort=effort, on_step=listener)

        return plan_with_groups(problem, sizes, find)
    until_s = limit.clock() + limit.seconds if limit else inf

    def is_over(step: SearchStep) -> bool:
        if on_step:
            on_step(step)
        return limit is not None and limit.clock() > until_s

    def limited() -> Score:
        return score_until(score, until_s, limit.clock) if limit else score

    try:
        if planner == "search":
            return search(problem, limited(), effort, is_over)
        if on_step:
            on_step(SearchStep(f"planner {planner}", None, inf))
        return replace(published_plan(problem, planner, limited, score), planner=planner)
    except Infeasible as refusal:
        if not problem.pins:
            raise
        raise pins_refused(problem, planner, refusal) from None


def check_hosts(problem: PlanningProblem) -> None:
    """Raise `Infeasible` if hosts cannot hold one copy of what optimizers need there."""
    hosts, profile = problem.cluster.hosts, problem.profile
    room = sum(host.memory_bytes for host in hosts)
    needed = profile.parameter_bytes(range(len(profile.layers))) * (
        2 + problem.optimizer_bytes_per_parameter_byte
    )
    if profile.device != "cpu" and all(host.memory_bytes for host in hosts) and needed > room:
        raise Infeasible(
            f"optimizer state in host memory takes {size_text(needed)} with weights and gradients, "
            f"and the hosts of cluster '{problem.cluster.name}' have {size_text(room)} (key "
            f"memory); use more memory, or an optimizer with less state"
        )


def published_plan(
    problem: PlanningProblem, planner: str, limited: Callable[[], Score], score: Score
) -> Plan:
    """Return the best plan of a published planner, also under schedules that it does not support.

    ``limited`` makes scores that are infinite for new plans after the deadline, once one fits.
    """
    make = PLANNERS[planner]
    known = tuple(name for name in problem.schedules if FAMILIES[name].is_planned)
    others = [name for name in problem.schedules if name not in known]
    if not others:
        return plan_of_planner(planner, make, problem, limited())
    base, found = problem.under(known or PlanningProblem.schedules), list[Plan]()
    try:
        first = plan_of_planner(planner, make, base, limited())
        # A plan of a schedule that is not allowed is never an answer, not even when time is up.
        found += [first] if known else []
    except Infeasible:
        wide = replace(base, cluster=with_boundless_memory(base.cluster))
        first = plan_of_planner(planner, make, wide, make_score(wide))
    in_time = limited()
    for name in others:
        plan = rescheduled(problem, first, name, in_time)
        if plan is None and in_time is not score and not found:
            # The deadline may have cut short the only schedule that fits.
            plan = rescheduled(problem, first, name, score)
        found += [plan] if plan else []
    if not found:
        raise infeasible(base, planner)
    return min(found, key=score)


def check_groups(problem: PlanningProblem) -> None:
    """Raise `BadInput` if a pin names devices, which are groups in plans with tensor groups.

    And where devices are to divide what groups divide already.
    """
    if problem.sharding not in ("auto", "off"):
        raise BadInput(
            f"--sharding {problem.sharding} does not go with tensor groups, which divide layers "
            f"already; leave out one of them"
        )
    for pin in problem.pins:
        if pin.devices:
            raise BadInput(
                f"pin '{pin.text}' names devices, and with tensor groups a plan's devices are the "
                f"groups; leave out the pin or --tensor-parallel"
            )


def pins_refused(problem: PlanningProblem, planner: str, refusal: Infeasible) -> Infeasible:
    """Return why a planner found no plan: nothing fits, it cannot keep pins, or one is too much."""
    free = replace(problem, pins=())
    if first_fitting(free, whole_chain(free)) is None:
        return refusal
    if planner != "search":
        return Infeasible(
            f"planner '{planner}' proposes no plan that keeps {pins_text(problem.pins)}; use "
            f"planner 'search', or leave a pin out"
        )
    from penstock.planners.pinned import best_pinned

    for pin in problem.pins:
        others = replace(problem, pins=tuple(other for other in problem.pins if other != pin))
        with suppress(Infeasible):
            if others.pins:
                best_pinned(others, make_score(others))
            return Infeasible(
                f"no plan that keeps pin '{pin.text}' fits in memory, and without it one does; "
                f"leave it out, or allow recompute or smaller micro-batches"
            )
    return Infeasible(
        f"no plan that keeps {pins_text(problem.pins)} fits in memory; leave some out"
    )


def score_until(score: Score, deadline_s: float, clock: Callable[[], float]) -> Score:
    """``score`` until the deadline; after it, infinite for plans that were not scored before.

    At least one plan that fits is scored, however long that takes.
    """
    known: dict[Plan, float] = {}
    found = False

    def limited(plan: Plan) -> float:
        nonlocal found
        if plan not in known:
            if found and clock() > deadline_s:
                return inf
            known[plan] = score(plan)
            found = found or known[plan] < inf
        return known[plan]

    return limited
