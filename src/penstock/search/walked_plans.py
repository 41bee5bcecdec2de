"""Simulates the plans of random walks: all under two orders, the fastest under many more."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from penstock.plan.plan import Plan, with_recompute
from penstock.search.depths import at_depth, simulate_depths
from penstock.search.families import adapted_to
from penstock.search.simulated_plans import SimulatedPlans, actions_of

__all__ = ["simulate_walked"]

QUICK_DEPTH = 4
"""Micro-batches in flight, for each stage from here to the end, of a plan's first order."""

NEAR = 1.1
"""Plans whose bound is above the best time by more than this factor are left out."""

ACTIONS = 1_200_000
"""Simulated actions of the first orders of all plans; about a second."""

FASTEST = 6
"""How many plans are tried under more orders."""


def simulate_walked(
    own: SimulatedPlans,
    simulated: SimulatedPlans,
    plans: Iterable[Plan],
    split: Sequence[str],
    seed: int,
) -> None:
    """Simulate the plans of walks, the fastest of them also at other depths (`simulate_depths`).

    Each is simulated with early backwards under ``own``, and under ``split``, schedules with one
    stage a device and split backwards.
    """
    seconds, actions = dict[Plan, float](), ACTIONS
    for plan in plans:
        if actions > 0:
            seconds[plan] = quick_s(own, simulated, plan, split)
            actions -= sum(actions_of(replace(plan, schedule=name)) for name in split)
            actions -= actions_of(plan)
    fastest = sorted((plan for plan in seconds if seconds[plan] < inf), key=seconds.__getitem__)
    simulate_depths(own, fastest[:FASTEST], seed)


def quick_s(
    own: SimulatedPlans, simulated: SimulatedPlans, plan: Plan, split: Sequence[str]
) -> float:
    """The least seconds of a plan under a few orders; with and without recompute."""
    problem, least_s = own.problem, inf
    for recompute in problem.recompute_choices:
        same = with_recompute(plan, recompute)
        early = at_depth(same, QUICK_DEPTH) if "early-backward" in problem.schedules else same
        orders = [(own, early)]
        orders += [(simulated, adapted_to(problem, same, name)) for name in split]
        for known, order in orders:
            if known.may_be_faster(order, NEAR * simulated.best_s):
                least_s = min(least_s, known.simulate(order))
    return least_s
