"""Simulates the plans of random walks: all under two orders, the fastest under many more."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from numpy.random import Generator, default_rng

from penstock.bounds.lower_bound import plan_bound_s
from penstock.plan.cost import depths_of
from penstock.plan.plan import Plan, with_cut, with_recompute
from penstock.plan.problem import PlanningProblem, Score
from penstock.search.families import adapted_to
from penstock.search.judge import ITS_DEVICE, MAKING_A_PLAN, NEAR, Judge, actions_of

__all__ = [
    "deeper_variants",
    "moved_cut",
    "moved_in_flight",
    "simulate_walked",
    "walked",
    "walked_depths",
]

QUICK_DEPTH = 4
"""Micro-batches in flight, for each stage from here to the end, of a plan's first order."""

ACTIONS = 1_200_000
"""Simulated actions of the first orders of all plans; about a second."""

FASTEST = 6
"""How many plans are tried under more orders."""


def simulate_walked(judge: Judge, plans: Iterable[Plan], split: Sequence[str], seed: int) -> None:
    """Simulate the plans of walks, the fastest of them also at other depths (`simulate_depths`).

    Each is simulated with early backwards, and under ``split``, schedules with one stage a device
    and split backwards.
    """
    seconds, actions = dict[Plan, float](), ACTIONS
    for plan in plans:
        if actions > 0:
            seconds[plan] = quick_s(judge, plan, split)
            actions -= sum(actions_of(replace(plan, schedule=name)) for name in split)
            actions -= actions_of(plan)
    fastest = sorted((plan for plan in seconds if seconds[plan] < inf), key=seconds.__getitem__)
    simulate_depths(judge, fastest[:FASTEST], seed)


def quick_s(judge: Judge, plan: Plan, split: Sequence[str]) -> float:
    """The least seconds of a plan under a few orders; with and without recompute."""
    problem, least_s = judge.problem, inf
    for recompute in problem.recompute_choices:
        same = with_recompute(plan, recompute)
        early = at_depth(same, QUICK_DEPTH) if "early-backward" in problem.schedules else same
        for order in (early, *(adapted_to(problem, same, name) for name in split)):
            if judge.may_be_faster(order, NEAR * judge.best_s):
                least_s = min(least_s, judge.simulate(order))
    return least_s


ACTIONS_WALKED = 1_500_000
"""Simulated actions of a walk over depths and recompute; about a second."""

WALKED = 16 * 40
"""Devices times layers from which walks have that length; on smaller problems they are shorter."""

HEAT, COLD = 0.004, 1e-4
"""The shares by which slower plans are accepted at first, and at the end."""

MOST_FAILURES = 500
"""A walk ends after so many plans in a row without a time: nothing fits, or time is up."""

MOST_LAYERS = 2
"""A cut moves by at most so many layers at once."""

DEPTHS = (1, 2, 3, 4, 6, 8)
"""Micro-batches in flight of a variant for each stage from here to the end."""

RECOMPUTE, ANOTHER_MOVE, MOST_OF_A_DEPTH = 0.1, 0.5, 0.5
"""Probabilities that a move changes recompute, and that another move follows before the plan is
simulated; and the largest share by which a depth changes."""


def simulate_depths(judge: Judge, plans: Iterable[Plan], seed: int) -> None:
    """Simulate variants of plans: schedules, depths and recompute.

    A random walk from the fastest variant changes depths and recompute further.
    """
    problem, found, found_s = judge.problem, None, inf
    for plan in plans:
        for variant in deeper_variants(problem, plan):
            if judge.may_be_faster(variant, found_s):
                seconds = judge.simulate(variant)
                if seconds < found_s:
                    found, found_s = variant, seconds
    if found is not None:
        generator = default_rng([len(problem.profile.layers), seed])
        size = len(problem.cluster.devices) * len(problem.profile.layers)
        actions = ACTIONS_WALKED * min(1.0, size / WALKED)
        judge.simulate(walked_depths(problem, judge.score, found, generator, actions))


def walked_depths(
    problem: PlanningProblem, score: Score, start: Plan, generator: Generator, actions: float
) -> Plan:
    """The stages of ``start`` with the best depths and recompute on a random walk (`walked`).

    The answer is ``start`` itself where the problem leaves no choice of depths, or where it does
    not fit.
    """
    first = replace(start, schedule="early-backward", in_flight_limit=depths_of(start))
    if "early-backward" not in problem.schedules or score(first) == inf:
        return start
    move = partial(moved_in_flight, problem, generator=generator)
    return walked(first, move, score, partial(plan_bound_s, problem), generator, actions)


def walked(
    start: Plan,
    move: Callable[[Plan], Plan],
    score: Score,
    bound_s: Score,
    generator: Generator,
    actions: float,
) -> Plan:
    """The fastest plan of a random walk by ``move``: simulated annealing of ``score``.

    (Kirkpatrick et al., Science 1983.) A slower plan is accepted with probability
    ``exp(-slowdown / heat)``. The heat falls evenly while ``actions`` forwards and backwards are
    simulated. The random number is drawn first, so a plan whose bound is too slow for it is not
    simulated.
    """
    current, current_s = start, score(start)
    best, best_s, left, failures = current, current_s, actions, 0
    while left > 0 and failures < MOST_FAILURES:
        plan = move(current)
        left -= MAKING_A_PLAN
        warmth = HEAT * left / actions + COLD
        limit_s = current_s * (1 + warmth * float(generator.standard_exponential()))
        if bound_s(plan) > limit_s:
            continue
        seconds = score(plan)
        # The order of a plan whose costs are those of the last one is known.
        left -= (ITS_DEVICE + plan.micro_batches) * len(plan.devices)
        failures = failures + 1 if seconds == inf else 0
        if seconds > limit_s or seconds == inf:
            continue
        current, current_s = plan, seconds
        if seconds < best_s:
            best, best_s = plan, seconds
    return best


def moved_cut(plan: Plan, generator: Generator) -> Plan:
    """The plan with other cuts; it keeps the costs, and so the order, that it has."""
    while True:
        s = int(generator.integers(1, len(plan.stages)))
        before, after = plan.stages[s - 1].layers, plan.stages[s].layers
        change = int(generator.integers(1, MOST_LAYERS + 1)) * (
            1 if generator.random() < 0.5 else -1
        )
        plan = with_cut(plan, s, min(max(after.start + change, before.start + 1), after.stop - 1))
        if generator.random() >= ANOTHER_MOVE:
            return plan


def moved_in_flight(problem: PlanningProblem, plan: Plan, generator: Generator) -> Plan:
    """The plan with another depth, or recompute, of one stage or several."""
    while True:
        if generator.random() < RECOMPUTE and problem.recompute == "auto":
            plan = other_recompute(plan, generator)
        else:
            plan = other_depth(plan, generator)
        if generator.random() >= ANOTHER_MOVE:
            return plan


def other_recompute(plan: Plan, generator: Generator) -> Plan:
    """The plan with recompute of one stage switched on or off."""
    stages = list(plan.stages)
    place = int(generator.integers(len(stages)))
    stages[place] = replace(stages[place], recompute=not stages[place].recompute)
    return replace(plan, stages=tuple(stages))


def other_depth(plan: Plan, generator: Generator) -> Plan:
    """The plan with one stage deeper or shallower, by little more often than by much.

    Other stages change where depths would otherwise grow along the pipeline.
    """
    depths = plan.in_flight_limit
    place = int(generator.integers(len(depths)))
    furthest = 1 + depths[place] * MOST_OF_A_DEPTH * float(generator.random()) ** 2
    change = int(furthest * generator.random() + 1) * (1 if generator.random() < 0.5 else -1)
    depth = min(max(1, depths[place] + change), plan.micro_batches)

    before = (max(other, depth) for other in depths[:place])
    after = (min(other, depth) for other in depths[place + 1 :])
    return replace(plan, in_flight_limit=(*before, depth, *after))


def deeper_variants(problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """The plan under each schedule and several depths, with and without recompute."""
    found: list[Plan] = []
    for recompute in problem.recompute_choices:
        same = with_recompute(plan, recompute)
        found += [
            replace(same, schedule=schedule, in_flight_limit=()) for schedule in problem.schedules
        ]
        if "early-backward" in problem.schedules:
            found += dict.fromkeys(at_depth(same, depth) for depth in DEPTHS)
    return found


def at_depth(plan: Plan, depth: int) -> Plan:
    """The plan with early backwards and ``depth`` in flight for each stage from here to the end."""
    stages = len(plan.stages)
    limits = tuple(min(plan.micro_batches, depth * (stages - s)) for s in range(stages))
    return replace(plan, schedule="early-backward", in_flight_limit=limits)
