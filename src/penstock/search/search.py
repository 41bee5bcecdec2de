"""The default planner: improves on the plans of the others, as the simulator judges."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import inf

from numpy.random import default_rng

from penstock.bounds.lower_bound import gap, lower_bound_s, plan_bound_s
from penstock.errors import Infeasible
from penstock.plan.fitted_plan import plan_fits
from penstock.plan.infeasible import infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import AS_FAST, Planner, PlanningProblem, Score
from penstock.plan.schedule_costs import priced
from penstock.planners.registry import STARTING_PLANNERS
from penstock.schedule.registry import FAMILIES
from penstock.search.every_plan import every_placement, every_variant
from penstock.search.families import (
    adapted_to,
    family_steps,
    placed_so,
    plain_families,
    skeletons,
    skeletons_of_plans,
)
from penstock.search.judge import (
    LEADING,
    MAKING_A_PLAN,
    NEAR,
    Judge,
    SearchStep,
    actions_of,
    judge_of,
)
from penstock.search.neighbours import climb, other_micro_batches
from penstock.search.preference import preferred
from penstock.search.walks import annealed, evenly_loaded_plans, simulate_walked

ACTIONS_FOR_MOVES, ACTIONS_FOR_MORE_MOVES = 1_500_000, 500_000
"""Simulated actions spent on moves from the best plan with whole backwards, about a second; and on
those from each other one that leads."""

PROVEN = 5e-4
"""A gap up to which a plan counts as good enough: the bound itself is no more precise."""

ROUNDS_OF_LOADS = ((0.02, False), (0.02, False), (0.25, True))
"""Rounds of random walks to evenly loaded plans, up to one that finds nothing: the gap from which
each is made, and whether it may start at a plan with split backwards. On 20 rows of the benchmark
and 24 random problems, further rounds after such a one found nothing in the mean."""

ALMOST = 1.05
"""How many times as long as the best plan one may take whose neighbours are tried at the end. Like
the next two it was chosen once, on four random problems on which the search was behind itself or a
planner; other values were not compared."""

ACTIONS_AT_THE_END, ACTIONS_FOR_A_WALK = 2_000_000, 400_000
"""Simulated actions spent on these neighbours, at most two seconds; and on each walk from one.
With 3 million a chain of equal blocks took a sixth longer, and nothing was faster."""

ALONE, MOST_ALONE = 0.1, 2
"""A gap to the bound from which the search is made once more under one schedule; and under how many
schedules. Of 60 random problems it was behind itself on 4, with gaps of 30 % or more; in most it
would find nothing. Without the planners' plans and the loads of step 2 it was up to 3.5 % behind on
four of five problems."""

TIGHTER = (0.75, 0.5)
"""Shares of the memory for which a new order of the best plan is tried."""

SMALL_CLUSTER, SMALL_PROBLEM = 4, 6000
"""Devices and placements up to which a problem counts as small: then all plans are simulated, those
with the least bound first, as long as `ACTIONS_FOR_ALL` last."""

ACTIONS_FOR_ALL = 3_000_000
"""Simulated actions for all plans of a small problem, about three seconds."""


def search_from(starts: Mapping[str, Planner]) -> Planner:
    """The planner that runs `search_steps` to the end."""

    def search(problem: PlanningProblem, score: Score) -> Plan:
        *_, last = search_steps(problem, score, starts)
        if last.plan is None:
            raise infeasible(problem, "search")
        return replace(last.plan, planner="search")

    return search


def search_steps(
    problem: PlanningProblem, score: Score, starts: Mapping[str, Planner]
) -> Iterator[SearchStep]:
    """Ever better plans, each with what is being tried; the last step has the best of all.

    1. Plans under the schedules that planners do not know (`family_steps`), on equal groups of
       devices.
    2. The plans of ``starts``, the other planners. So the answer is never worse than theirs under
       the same score. Then further plans with one stage a device
       (`straight_steps`), unless their proven bound is not below the best time.
    3. The devices and layers of the best plans of 2, under the schedules of 1.
    4. Moves, other schedules and other cuts of the best plans of each schedule and each placement
       (`improve_leaders`).
    5. Every order that is searched for, of the best plan (`simulate_other_orders`).
    6. All of this once more, for the best schedule alone (`search_alone`).
    7. Of all plans that are about as fast as the best, the one that people would choose, perhaps on
       other devices of the same kinds (`preferred`).

    The last step has no plan where nothing fits.
    """
    judge = judge_of(problem, score)
    known = judge.problem.schedules
    others = tuple(name for name in problem.schedules if name not in known)
    plain = plain_families(others)
    split = placed_so(plain, "straight", 1)[-1:]
    if others:
        yield from family_steps(judge, skeletons(judge.problem, plain))
    yield judge.step("lower bound")
    bound_s = lower_bound_s(judge.problem)
    planned = yield from planner_steps(judge, starts)
    if known[0] not in problem.schedules or bound_s * (1 + PROVEN) < judge.best_s:
        yield from straight_steps(judge, split, bound_s)
    if others:
        plans = [*judge.leading(known), *judge.leading(split), *planned]
        further = skeletons_of_plans(judge.problem, plain, list(dict.fromkeys(plans)))
        yield from family_steps(judge, further)
    yield from improve_leaders(judge, planned)
    simulate_other_orders(judge)
    yield from search_alone(judge, problem, starts, planned)
    allowed = dict(judge.fastest(problem.schedules))
    answer = judge.step("done")
    if allowed:
        plan, seconds = preferred(problem, allowed, score)
        answer = SearchStep("done", plan, seconds)
    yield answer


def improve_leaders(judge: Judge, planned: Sequence[Plan]) -> Iterator[SearchStep]:
    """Improve the best plans of each schedule and of each placement on groups of equal sizes.

    As long as there is a new one: the plans of the planners and the fastest ones are tried under
    every schedule that takes their stages; moves are tried, and other cuts by a random walk, once
    for each placement. So the answer is seldom behind that for one of the schedules alone.
    """
    climbed, adapted, generator = set[Plan](), set[object](), default_rng(0)
    actions = float(ACTIONS_AT_THE_END)
    while actions > 0:
        almost = [plan for plan, s in judge.fastest(judge.allowed) if s < ALMOST * judge.best_s]
        plain = [plan for plan in almost if not FAMILIES[plan.schedule].is_searched]
        for plan in [*planned, *with_own_stages(plain), *with_own_stages(almost)]:
            for name in alike(judge.allowed, plan):
                if (plan.stages, name) not in adapted:
                    adapted.add((plan.stages, name))
                    yield judge.step(f"schedule {name}")
                    actions -= simulated_at(judge, plan, name)
        first = dict[object, Plan]()
        for plan in almost:
            first.setdefault(plan.schedule, plan)
            # Under an order that is searched for, only cuts move.
            first.setdefault((*placed(plan), FAMILIES[plan.schedule].is_searched), plan)
        left = [plan for plan in first.values() if plan not in climbed]
        if not left:
            return
        # A schedule whose best plan has not moved yet comes before others once more.
        tried = {plan.schedule for plan in climbed}
        plan = min(left, key=lambda plan: plan.schedule in tried)
        climbed.add(plan)
        yield judge.step(f"moves under {plan.schedule}")
        known = len(judge.seconds)
        climb(judge, plan, judge.simulate(plan), min(actions, ACTIONS_FOR_MORE_MOVES))
        actions -= actions_of(plan) * (len(judge.seconds) - known)
        # A walk that may change depths spends most moves on them, and cuts are still to be moved.
        place = (*placed(plan), FAMILIES[plan.schedule].is_planned)
        if len(plan.stages) > 1 and place not in adapted:
            adapted.add(place)
            end = annealed(judge, plan, generator, ACTIONS_FOR_A_WALK)
            actions -= ACTIONS_FOR_A_WALK
            judge.simulate(priced(judge.problem, end))


def placed(plan: Plan) -> tuple[object, ...]:
    """The sizes of a plan's sets of devices, and which stages they hold."""
    return *map(len, plan.device_groups), plan.placement


def with_own_stages(plans: Sequence[Plan]) -> list[Plan]:
    """The first plans that differ in their stages."""
    found = dict[object, Plan]()
    for plan in plans:
        found.setdefault(plan.stages, plan)
    return list(found.values())[:LEADING]


def simulated_at(judge: Judge, plan: Plan, schedule: str) -> int:
    """Try a plan under a schedule; the actions that were simulated."""
    other = adapted_to(judge.problem, plan, schedule)
    if other in judge.seconds or not judge.may_be_faster(other, judge.best_s):
        return MAKING_A_PLAN
    judge.simulate(other)
    return actions_of(other)


def alike(allowed: Sequence[str], plan: Plan) -> list[str]:
    """The other schedules that a plan may have, with its placement."""
    rounds = len(plan.stages) // len(plan.device_groups)
    names = placed_so(allowed, FAMILIES[plan.schedule].placement, rounds)
    searched = [name for name in allowed if FAMILIES[name].is_searched]
    return [name for name in (*names, *searched) if name != plan.schedule]


def simulate_other_orders(judge: Judge) -> None:
    """If the best order was searched for, do so with other micro-batches, and with less memory.

    The search for it is greedy, and sometimes finds a faster order then.
    """
    _, plan = judge.best_of(judge.allowed)
    if plan is None or not FAMILIES[plan.schedule].is_searched:
        return
    for other in other_micro_batches(judge.problem, plan):
        judge.simulate(adapted_to(judge.problem, other, plan.schedule))
    for share in TIGHTER:
        judge.simulate(
            replace(plan, memory_bytes=tuple(share * room for room in plan.memory_bytes))
        )


def search_alone(
    judge: Judge, problem: PlanningProblem, starts: Mapping[str, Planner], planned: Sequence[Plan]
) -> Iterator[SearchStep]:
    """Search once more under the best schedule alone, and the next if its plan is as fast.

    Only if the gap to the bound is wide. All schedules share the simulated actions of a search, so
    one alone gets more of them. Planners that would be asked the same again are not: ``planned``
    are their plans.
    """
    best_s, known = judge.best_s, judge.problem.schedules
    if len(judge.allowed) == 1 or not ALONE <= gap(best_s, lower_bound_s(judge.problem)) < inf:
        return
    as_fast = sorted(
        (seconds, judge.allowed.index(name))
        for name, (seconds, _) in judge.leaders.items()
        if name in judge.allowed and seconds <= best_s * (1 + AS_FAST)
    )
    plans = {str(number): asked_before(plan) for number, plan in enumerate(planned)}
    for name in [judge.allowed[place] for _, place in as_fast[:MOST_ALONE]]:
        own = problem.under((name,))
        same = judge_of(own, judge.score).problem.schedules == known
        for step in search_steps(own, judge.score, plans if same else starts):
            if step.plan is not None:
                judge.simulate(step.plan)
            yield judge.step(f"{name} alone: {step.doing}")


def asked_before(plan: Plan) -> Planner:
    return lambda problem, score: plan


def planner_steps(
    judge: Judge, starts: Mapping[str, Planner]
) -> Generator[SearchStep, None, list[Plan]]:
    found: list[Plan] = []
    for name, planner in starts.items():
        yield judge.step(f"planner {name}")
        try:
            found.append(planner(judge.problem, judge.score))
        except Infeasible:
            continue
        judge.simulate(found[-1])
    yield judge.step("planners")
    return found


def straight_steps(
    judge: Judge, split: Sequence[str], bound_s: float
) -> Generator[SearchStep, None, None]:
    """Ever better plans with one stage a device.

    1. Moves from the best plans with whole backwards, as long as one makes them better (`climb`).
    2. If the gap to the bound is large enough, plans that load devices and links evenly
       (`evenly_loaded_plans`), the fastest of them with the schedule, depth and recompute that suit
       them best. The random walks of each round start at the best plan so far (`ROUNDS_OF_LOADS`),
       and their plans are also tried under ``split``, schedules with split backwards.
    3. On small problems every plan (`every_plan`), except those whose proven bound shows that they
       cannot win. If `ACTIONS_FOR_ALL` last for them, the answer is optimal among plans with whole
       backwards.

    All end as soon as the best plan meets the bound.
    """
    known = judge.problem.schedules
    yield from improve(judge, judge.whole[1], bound_s, ACTIONS_FOR_MOVES)
    for plan in judge.leading(known)[1:]:
        if judge.simulate(plan) < NEAR * judge.whole[0]:
            yield from improve(judge, plan, bound_s, ACTIONS_FOR_MORE_MOVES)
    for seed, (least_gap, may_split) in enumerate(ROUNDS_OF_LOADS):
        before_s, start = judge.whole
        if start is None or gap(before_s, bound_s) < least_gap:
            break
        yield judge.step("even loads")
        fastest_s = judge.best_s
        if may_split:
            start, _ = next(judge.fastest([*known, *split]))
        simulate_walked(judge, evenly_loaded_plans(judge.problem, start, seed), split)
        now_s, plan = judge.whole
        if now_s < before_s:
            yield from improve(judge, plan, bound_s, ACTIONS_FOR_MOVES)
        elif judge.best_s == fastest_s:
            break
    if gap(judge.whole[0], bound_s) > PROVEN:
        yield from simulate_all(judge)
    yield judge.step("moves")


def improve(
    judge: Judge, plan: Plan | None, bound_s: float, actions: float
) -> Iterator[SearchStep]:
    """Climb from a plan, unless the best one already meets the bound."""
    if plan is not None and gap(judge.whole[0], bound_s) > PROVEN:
        yield judge.step("moves")
        climb(judge, plan, judge.simulate(plan), actions)


def simulate_all(judge: Judge) -> Iterator[SearchStep]:
    """On a small problem simulate every plan that its bound does not rule out."""
    problem = judge.problem
    if len(problem.cluster.devices) > SMALL_CLUSTER:
        return
    placements = list(islice(every_placement(problem), SMALL_PROBLEM + 1))
    if len(placements) > SMALL_PROBLEM:
        return
    yield judge.step("all plans")
    bounds, actions = [plan_bound_s(problem, plan) for plan in placements], ACTIONS_FOR_ALL
    for i in sorted(range(len(placements)), key=bounds.__getitem__):
        if bounds[i] > judge.whole[0] or actions <= 0:
            return
        variants = every_variant(problem, placements[i])
        first = next(variants)
        # One micro-batch in flight needs the least memory, and recompute saves nothing then.
        if plan_fits(problem, first) or not first.in_flight_limit:
            for plan in chain([first], variants):
                # A bound takes about as long as making a plan.
                actions -= MAKING_A_PLAN
                if judge.may_be_faster(plan, judge.whole[0]):
                    actions -= actions_of(plan)
                    judge.simulate(plan)
                if actions <= 0:
                    break


PLANNERS: dict[str, Planner] = {"search": search_from(STARTING_PLANNERS), **STARTING_PLANNERS}
