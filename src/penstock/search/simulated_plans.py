"""The plans that a search has simulated, and hill climbing from one of them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from penstock.bounds.lower_bound import plan_bound_s
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score, score_of
from penstock.plan.schedule_costs import priced
from penstock.schedule.registry import FAMILIES
from penstock.search.moves import moves
from penstock.search.skeletons import load_s
from penstock.search.step import SearchStep

__all__ = ["MAKING_A_PLAN", "SimulatedPlans", "actions_of", "climb"]

MAKING_A_PLAN, ITS_DEVICE = 500, 30
"""Making and looking up a plan counts as so many simulated actions, and so many for each device."""

ORDERED = 4
"""Making the order of an action takes this many times as long as simulating it. The orders of the
planners' own schedules take no time."""


@dataclass
class SimulatedPlans:
    """Every plan that was simulated, with its seconds, and the fastest that the problem allows."""

    problem: PlanningProblem
    score: Score
    seconds: dict[Plan, float] = field(default_factory=dict[Plan, float])
    best: Plan | None = None
    best_s: float = inf

    def simulate(self, plan: Plan) -> float:
        """Seconds of a plan; infinite where it does not fit, or its schedule refuses it."""
        if plan.planner != "search":
            plan = replace(plan, planner="search")
        if plan not in self.seconds:
            self.seconds[plan] = score_of(plan, self.score)
        seconds = self.seconds[plan]
        if seconds < self.best_s and plan.schedule in self.problem.schedules:
            self.best, self.best_s = plan, seconds
        return seconds

    def may_be_faster(self, plan: Plan, than_s: float) -> bool:
        """Whether no bound shows that the plan takes at least so long."""
        if FAMILIES[plan.schedule].is_planned:
            return plan_bound_s(self.problem, plan) < than_s
        return not plan.costs or load_s(plan) < than_s

    def fastest(self, schedules: Collection[str]) -> Iterator[tuple[Plan, float]]:
        """The plans under some schedules that fit, the fastest first."""
        found = ((p, s) for p, s in self.seconds.items() if s < inf and p.schedule in schedules)
        return iter(sorted(found, key=lambda one: one[1]))

    def step(self, doing: str) -> SearchStep:
        """A step with the best plan so far."""
        return SearchStep(doing, self.best, self.best_s)


def actions_of(plan: Plan) -> int:
    """The cost of simulating a plan, in simulated actions."""
    devices = len(plan.devices)
    actions = MAKING_A_PLAN + (ITS_DEVICE + plan.micro_batches) * devices
    if FAMILIES[plan.schedule].is_planned:
        return actions
    return actions + ORDERED * plan.micro_batches * len(plan.stages)


def climb(
    simulated: SimulatedPlans, plan: Plan, seconds: float, actions: float
) -> tuple[Plan, float]:
    """Move on to each faster neighbour until there is none, or ``actions`` are spent.

    Cuts move under the order that was made for the plan before, so most orders need not be made. An
    order for the last plan's own costs is tried at the end.
    """
    plan, improved = replace(plan, planner="search"), True
    while improved and actions > 0:
        improved = False
        for other in moves(simulated.problem, plan):
            if other in simulated.seconds or not simulated.may_be_faster(other, seconds):
                continue
            actions -= actions_of(other)
            other_s = simulated.simulate(other)
            if other_s < seconds:
                plan, seconds, improved = other, other_s, True
                break
            if actions <= 0:
                break
    last = priced(simulated.problem, plan)
    return min([(plan, seconds), (last, simulated.simulate(last))], key=lambda one: one[1])
