"""Simulates the plans of random walks, the fastest under many orders; and a walk over cuts."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from numpy.random import Generator

from penstock.plan.plan import Plan, with_cut, with_recompute
from penstock.plan.problem import PlanningProblem, Score
from penstock.search.families import adapted_to
from penstock.search.judge import ITS_DEVICE, MAKING_A_PLAN, NEAR, Judge, actions_of

__all__ = ["moved_cut", "simulate_walked", "walked_cuts"]

QUICK_DEPTH = 4
"""Micro-batches in flight, for each stage from here to the end, of a plan's first order."""

ACTIONS = 1_200_000
"""Simulated actions of the first orders of all plans; about a second."""

FASTEST = 6
"""How many plans are tried under more orders."""

DEPTHS = (1, 2, 3, 4, 6, 8)
"""Micro-batches in flight of their orders, for each stage from here to the end."""

HEAT, COLD = 0.004, 1e-4
"""The shares by which slower plans are accepted at first, and at the end, of a walk over cuts."""

MOST_LAYERS, ANOTHER_MOVE = 2, 0.5
"""A cut moves by at most so many layers at once; and the probability that another cut moves too."""


def simulate_walked(judge: Judge, plans: Iterable[Plan], split: Sequence[str]) -> None:
    """Simulate the plans of walks, the fastest of them under every schedule and several depths.

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
    for plan in fastest[:FASTEST]:
        for variant in deeper_variants(judge.problem, plan):
            if judge.may_be_faster(variant, judge.whole[0]):
                judge.simulate(variant)


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


def walked_cuts(start: Plan, score: Score, generator: Generator, actions: float) -> Plan:
    """The fastest plan of a random walk over cuts: simulated annealing of ``score``.

    (Kirkpatrick et al., Science 1983.) A slower plan is accepted with probability
    ``exp(-slowdown / heat)``. The heat falls evenly while ``actions`` forwards and backwards are
    simulated.
    """
    current, current_s = start, score(start)
    best, best_s, left = current, current_s, actions
    while left > 0:
        plan = moved_cut(current, generator)
        seconds = score(plan)
        warmth = HEAT * left / actions + COLD
        # The order of a plan whose costs are those of the last one is known.
        left -= MAKING_A_PLAN + (ITS_DEVICE + plan.micro_batches) * len(plan.devices)
        if seconds <= current_s * (1 + warmth * float(generator.standard_exponential())):
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
