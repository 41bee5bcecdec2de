"""The default planner: improves on the plans of the others, as the simulator judges.

Chooses among plans that are about as fast as the best one, as people would.

The criteria, in this order: fewer devices; sets of devices that are whole hosts, or neighbours on
one host; fewer stages; less recompute; more memory left; the shortest time.
"""

from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from math import ceil, inf
from typing import TypeVar

from penstock.bounds.lower_bound import gap, lower_bound_s, plan_bound_s
from penstock.cluster.cluster import Cluster
from penstock.errors import Infeasible
from penstock.plan.fitted_plan import plan_fits
from penstock.plan.infeasible import infeasible
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan
from penstock.plan.problem import Planner, PlanningProblem, Score, score_of
from penstock.plan.schedule_costs import least_room, stages_of_groups, with_costs
from penstock.planners.registry import STARTING_PLANNERS
from penstock.schedule.clock import memory_peaks_bytes
from penstock.schedule.registry import FAMILIES
from penstock.search.even_loads import evenly_loaded_plans
from penstock.search.every_plan import every_placement, every_variant
from penstock.search.families import adapted_to, family_steps, plain_families
from penstock.search.simulated_plans import (
    MAKING_A_PLAN,
    SearchStep,
    SimulatedPlans,
    actions_of,
    climb,
)
from penstock.search.skeletons import placed_so, skeletons, skeletons_of_plans
from penstock.search.walked_plans import simulate_walked

__all__ = ["PLANNERS", "STARTING_PLANNERS", "preferred", "scatter", "search_from", "search_steps"]

Found = TypeVar("Found")

ACTIONS_FOR_MOVES, ACTIONS_FOR_MORE_MOVES = 1_500_000, 500_000
"""Simulated actions spent on moves from the best plan with whole backwards, about a second; and on
those from each other one that leads."""

NEAR = 1.1
"""How many times as long as the best plan another one may take to be improved too."""

PROVEN = 5e-4
"""A gap up to which a plan counts as good enough: the bound itself is no more precise."""

WIDE_GAP = 0.25
"""A gap from which all rounds are made; below it, they end with one that finds nothing."""

ROUNDS_OF_LOADS = ((0.02, False), (0.02, False), (WIDE_GAP, True))
"""Rounds of random walks to evenly loaded plans: the gap from which each is made, and whether it
may start at a plan with split backwards."""

LEADING = 6
"""How many of the best plans with whole backwards, and with split ones, are tried under other
schedules."""

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
        best: Plan | None = None
        for step in search_steps(problem, score, starts):
            best = step.plan
        if best is None:
            raise infeasible(problem, "search")
        return best

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
    4. Every order that is searched for, of the best plan (`simulate_other_orders`).
    5. Of all plans that are about as fast as the best, the one that people would choose, perhaps on
       other devices of the same kinds (`preferred`).

    The last step has no plan where nothing fits.
    """
    known = tuple(name for name in problem.schedules if name in PlanningProblem.schedules)
    known = known or tuple(name for name in problem.schedules if FAMILIES[name].is_planned)
    others = tuple(name for name in problem.schedules if name not in known)
    whole = replace(problem, schedules=known or PlanningProblem.schedules) if others else problem
    simulated, plain = SimulatedPlans(problem, score), plain_families(others)
    own = SimulatedPlans(whole, score, simulated.seconds)
    split = placed_so(plain, "straight", 1)[-1:]
    if others:
        yield from family_steps(simulated, skeletons(problem, plain), others)
    yield simulated.step("lower bound")
    bound_s = lower_bound_s(whole)
    planned = yield from with_best_of_all(own, simulated, planner_steps(own, starts))
    if not known or bound_s * (1 + PROVEN) < simulated.best_s:
        straight = straight_steps(own, simulated, split, bound_s)
        yield from with_best_of_all(own, simulated, straight)
    if others:
        plans = [*leading(simulated, whole.schedules), *leading(simulated, split), *planned]
        further = skeletons_of_plans(problem, plain, list(dict.fromkeys(plans)))
        yield from family_steps(simulated, further, others)
    simulate_other_orders(simulated)
    allowed = dict(simulated.fastest(problem.schedules))
    answer = simulated.step("done")
    if allowed:
        plan, seconds = preferred(problem, allowed, score)
        answer = SearchStep("done", replace(plan, planner="search"), seconds)
    yield answer


def simulate_other_orders(simulated: SimulatedPlans) -> None:
    """Try the best plan under each schedule that searches for orders, then also with less memory.

    Such a search is greedy: with less memory it sometimes finds a faster order.
    """
    problem = simulated.problem
    for name in problem.schedules:
        plan = simulated.best
        if plan and FAMILIES[name].is_searched and not any(s.recompute for s in plan.stages):
            simulated.simulate(adapted_to(problem, plan, name))
    plan = simulated.best
    if plan is None or not FAMILIES[plan.schedule].is_searched:
        return
    for share in TIGHTER:
        simulated.simulate(
            replace(plan, memory_bytes=tuple(share * room for room in plan.memory_bytes))
        )


def with_best_of_all(
    own: SimulatedPlans, simulated: SimulatedPlans, steps: Generator[SearchStep, None, Found]
) -> Generator[SearchStep, None, Found]:
    """``steps`` of a part of the search, each with the best plan of the whole search."""
    try:
        while True:
            step = next(steps)
            if own.best and own.best_s < simulated.best_s:
                simulated.simulate(own.best)
            yield simulated.step(step.doing)
    except StopIteration as end:
        return end.value


def planner_steps(
    own: SimulatedPlans, starts: Mapping[str, Planner]
) -> Generator[SearchStep, None, list[Plan]]:
    """The plans of the other planners."""
    found: list[Plan] = []
    for name, planner in starts.items():
        yield own.step(f"planner {name}")
        try:
            found.append(replace(planner(own.problem, own.score), planner="search"))
        except Infeasible:
            continue
        own.simulate(found[-1])
    yield own.step("planners")
    return found


def leading(simulated: SimulatedPlans, schedules: Collection[str]) -> list[Plan]:
    """The fastest plans with one stage a device that differ in their numbers of replicas."""
    found: dict[object, Plan] = {}
    for plan, _ in simulated.fastest(schedules):
        found.setdefault(tuple(map(len, plan.device_groups)), plan)
        if len(found) == LEADING:
            break
    return list(found.values())


def straight_steps(
    own: SimulatedPlans, simulated: SimulatedPlans, split: Sequence[str], bound_s: float
) -> Generator[SearchStep, None, None]:
    """Ever better plans with one stage a device.

    ``own`` has the plans with whole backwards, ``split`` are schedules with split backwards.

    1. Moves from the best plans, as long as one makes them better (`simulated_plans`).
    2. If the gap to the bound is large enough, plans that load devices and links evenly
       (`evenly_loaded_plans`), the fastest of them with the schedule, depth and recompute that suit
       them best. The random walks of each round start at the best plan so far (`ROUNDS_OF_LOADS`).
    3. On small problems every plan (`every_plan`), except those whose proven bound shows that they
       cannot win. If `ACTIONS_FOR_ALL` last for them, the answer is optimal among plans with whole
       backwards.

    All end as soon as the best plan meets the bound.
    """
    yield from improve(own, own.best, bound_s, ACTIONS_FOR_MOVES)
    for plan in leading(own, own.problem.schedules)[1:]:
        if own.simulate(plan) < NEAR * own.best_s:
            yield from improve(own, plan, bound_s, ACTIONS_FOR_MORE_MOVES)
    for seed, (least_gap, may_split) in enumerate(ROUNDS_OF_LOADS):
        if own.best is None or gap(own.best_s, bound_s) < least_gap:
            break
        yield own.step("even loads")
        before_s, fastest_s = own.best_s, simulated.best_s
        start = own.best
        if may_split:
            start, _ = next(simulated.fastest([*own.problem.schedules, *split]))
        plans = evenly_loaded_plans(own.problem, start, seed)
        simulate_walked(own, simulated, plans, split, seed)
        if own.best_s < before_s:
            yield from improve(own, own.best, bound_s, ACTIONS_FOR_MOVES)
        elif simulated.best_s == fastest_s and gap(own.best_s, bound_s) < WIDE_GAP:
            break
    if own.best is None or gap(own.best_s, bound_s) > PROVEN:
        yield from simulate_all(own)
    yield own.step("moves")


def improve(
    own: SimulatedPlans, plan: Plan | None, bound_s: float, actions: float
) -> Iterator[SearchStep]:
    """Climb from a plan, unless the best one already meets the bound."""
    if plan is not None and gap(own.best_s, bound_s) > PROVEN:
        yield own.step("moves")
        climb(own, plan, own.simulate(plan), actions)


def simulate_all(own: SimulatedPlans) -> Iterator[SearchStep]:
    """On a small problem simulate every plan that its bound does not rule out."""
    problem = own.problem
    if len(problem.cluster.devices) > SMALL_CLUSTER:
        return
    placements = list(islice(every_placement(problem), SMALL_PROBLEM + 1))
    if len(placements) > SMALL_PROBLEM:
        return
    yield own.step("all plans")
    bounds, actions = [plan_bound_s(problem, plan) for plan in placements], ACTIONS_FOR_ALL
    for i in sorted(range(len(placements)), key=bounds.__getitem__):
        if bounds[i] > own.best_s or actions <= 0:
            return
        variants = every_variant(problem, placements[i])
        first = next(variants)
        # One micro-batch in flight needs the least memory, and recompute saves nothing then.
        if plan_fits(problem, first) or not first.in_flight_limit:
            for plan in chain([first], variants):
                # A bound takes about as long as making a plan.
                actions -= MAKING_A_PLAN
                if own.may_be_faster(plan, own.best_s):
                    actions -= actions_of(plan)
                    own.simulate(plan)
                if actions <= 0:
                    break


ROUNDING = 1e-9
"""Times that differ by less are equal."""

RENUMBERED = 4
"""How many plans are tried on whole hosts."""

COMPARED_BY_MEMORY = 6
"""Of how many plans that are equal otherwise the memory left is compared."""

MEMORY_STEP = 0.05
"""Smaller differences, as a share of a device's memory, do not count."""


def preferred(
    problem: PlanningProblem, simulated: Mapping[Plan, float], score: Score
) -> tuple[Plan, float]:
    """The plan to choose of those ``simulated``, and its seconds.

    Plans that are slower than the fastest by `PlanningProblem.as_fast` at most take part. So do the
    preferred of them with renumbered devices, if their sets of devices are less scattered then.
    """
    first = about_as_fast(simulated, problem.as_fast)
    renumbered = {
        other: score_of(other, score)
        for plan in sorted(first, key=lambda plan: (layout(problem, plan), first[plan]))[
            :RENUMBERED
        ]
        for other in on_whole_hosts(problem.cluster, plan)
        if other not in simulated
    }
    known = about_as_fast({**first, **renumbered}, problem.as_fast)
    least = min(layout(problem, plan) for plan in known)
    alike = sorted(
        (plan for plan in known if layout(problem, plan) == least), key=known.__getitem__
    )
    chosen = alike[0]
    # An order that is searched for takes too long to make again.
    compared = [
        plan for plan in alike[:COMPARED_BY_MEMORY] if not FAMILIES[plan.schedule].is_searched
    ]
    if chosen in compared[:-1]:
        chosen = min(compared, key=lambda plan: ceil(fullest_share(problem, plan) / MEMORY_STEP))
    return chosen, known[chosen]


def about_as_fast(simulated: Mapping[Plan, float], as_fast: float) -> dict[Plan, float]:
    """The plans that are about as fast as the fastest."""
    limit_s = min(simulated.values()) * (1 + max(as_fast, ROUNDING))
    return {plan: seconds for plan, seconds in simulated.items() if seconds <= limit_s}


def layout(problem: PlanningProblem, plan: Plan) -> tuple[int, ...]:
    """Devices, how scattered they are, stages, recomputed layers: the fewer the better."""
    recomputed = sum(
        len(stage.recompute_layers or stage.layers) for stage in plan.stages if stage.recompute
    )
    return len(plan.devices), *scatter(problem.cluster, plan), len(plan.stages), recomputed


def scatter(cluster: Cluster, plan: Plan) -> tuple[int, int]:
    """How many more hosts than necessary the sets of devices are on, and gaps in their numbers."""
    largest = max(len(host.devices) for host in cluster.hosts)
    hosts, gaps = 0, 0
    for devices in plan.device_groups:
        touched = {cluster.host_index[device] for device in devices}
        hosts += len(touched) - ceil(len(devices) / largest)
        gaps += sum(after - before != 1 for before, after in pairwise(sorted(devices)))
    return hosts, gaps


def on_whole_hosts(cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """The plan on other devices of the same kinds, if its sets are less scattered there."""
    groups = plan.device_groups
    by_size = sorted(groups, key=len, reverse=True)
    for order in dict.fromkeys((groups, tuple(by_size))):
        new = packed(cluster, order)
        stages = tuple(replace(stage, devices=new[stage.devices]) for stage in plan.stages)
        renumbered = replace(plan, stages=stages)
        if scatter(cluster, renumbered) < scatter(cluster, plan):
            yield renumbered


def packed(
    cluster: Cluster, groups: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For each set of devices, others of the same kinds on as few hosts as possible.

    Each set in turn takes the host that it fills most. If no host has all of its devices, it takes
    those of the emptiest hosts.
    """
    devices = cluster.devices
    free: list[list[int]] = [[] for _ in cluster.hosts]
    for device, host in enumerate(cluster.host_index):
        free[host].append(device)
    new: dict[tuple[int, ...], tuple[int, ...]] = {}
    for group in groups:
        needed = Counter(devices[device] for device in group)
        taken: list[int] = []
        while needed.total():
            have = [sum((needed & Counter(devices[d] for d in one)).values()) for one in free]
            host = max(range(len(free)), key=lambda h: (have[h], -len(free[h]), -h))
            for device in tuple(free[host]):
                if needed[devices[device]]:
                    needed[devices[device]] -= 1
                    free[host].remove(device)
                    taken.append(device)
        taken.sort()
        places: list[int] = []
        for device in group:
            same = next(one for one in taken if devices[one] == devices[device])
            taken.remove(same)
            places.append(same)
        new[group] = tuple(places)
    return new


def fullest_share(problem: PlanningProblem, plan: Plan) -> float:
    """The largest share of a device's memory that the plan needs."""
    peaks = memory_peaks_bytes(order_of(plan), with_costs(problem, plan).shape())
    shares: list[float] = []
    for (devices, stages), peak in zip(stages_of_groups(plan).items(), peaks, strict=True):
        left, _, replica = least_room(problem, devices, stages)
        memory_bytes = problem.cluster.devices[devices[replica]].memory_bytes
        shares.append(1 - (left - peak) / memory_bytes if memory_bytes < inf else 0.0)
    return max(shares)


PLANNERS: dict[str, Planner] = {"search": search_from(STARTING_PLANNERS), **STARTING_PLANNERS}
