"""Simulated annealing: random moves judged by the simulator itself, worse plans taken at times."""

from dataclasses import replace
from math import inf

from numpy.random import Generator

from penstock.bounds.lower_bound import plan_bound_s
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.search.layout import Move, layout_of, moved, plan_of

__all__ = ["annealed", "deeper_variants"]

MOVE_COST = 300
"""Actions that making a plan counts as, beside those that are simulated."""

COLD = 1e-4
"""Slower plans than this are never taken at the end."""

STRAYED = 1.15
"""A walk that is so much slower than its best plan goes back there."""

LOST = 500
"""After so many plans in a row without a time a walk ends: nothing fits, or time is up."""

DEPTHS = (1, 2, 3, 4, 6, 8)
"""Micro-batches in flight that variants have for every stage that is left."""


def annealed(
    problem: PlanningProblem,
    score: Score,
    start: Plan,
    generator: Generator,
    actions: float,
    heat: float,
    move: Move = moved,
) -> Plan:
    """The best plan on a random walk from ``start`` (Kirkpatrick et al., Science 1983).

    Each step changes cuts, devices, replicas, depths, recompute, micro-batch size or schedule, or
    what else ``move`` draws; a slower plan is taken with probability ``exp(-slowdown / heat)``, and
    ``heat`` falls evenly to nothing while ``actions`` forwards and backwards are simulated. As the
    random number is drawn first, a plan whose proven bound is too slow for it is not simulated at
    all.
    """
    layout, current_s = layout_of(start), score(start)
    best, best_s, left, lost = start, current_s, actions, 0
    while left > 0 and lost < LOST:
        left -= MOVE_COST
        changed = move(problem, layout, generator)
        plan = plan_of(problem, changed) if changed else None
        if changed is None or plan is None:
            continue
        warmth = heat * left / actions + COLD
        limit_s = current_s * (1 + warmth * float(generator.standard_exponential()))
        if plan_bound_s(problem, plan) > limit_s:
            continue
        seconds = score(plan)
        left -= 2 * plan.micro_batches * len(plan.devices)
        lost = lost + 1 if seconds == inf else 0
        if seconds > limit_s or seconds == inf:
            continue
        layout, current_s = changed, seconds
        if seconds < best_s:
            best, best_s = plan, seconds
        elif seconds > best_s * STRAYED and best is not start:
            layout, current_s = layout_of(best), best_s
    return best


def deeper_variants(problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """A plan with more micro-batches in flight, with and without recompute."""
    choices = {"auto": (False, True), "on": (True,), "off": (False,)}[problem.recompute]
    stages = len(plan.stages)
    found: list[Plan] = []
    for again in choices:
        same = tuple(replace(stage, recompute=again) for stage in plan.stages)
        found += [
            replace(plan, stages=same, schedule=schedule, in_flight_limit=())
            for schedule in problem.schedules
        ]
        if "early-backward" in problem.schedules:
            limits = [
                tuple(min(plan.micro_batches, depth * (stages - s)) for s in range(stages))
                for depth in DEPTHS
            ]
            found += [
                replace(plan, stages=same, schedule="early-backward", in_flight_limit=limit)
                for limit in dict.fromkeys(limits)
            ]
    return found
