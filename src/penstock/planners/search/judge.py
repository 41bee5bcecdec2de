"""Simulates plans exactly, each once, and keeps the fastest under every schedule."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import inf

from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score, score_of
from penstock.schedule.registry import FAMILIES


@dataclass(frozen=True, slots=True)
class SearchStep:
    """Current work, and the best plan so far with its seconds; before, None and infinite."""

    doing: str
    plan: Plan | None
    seconds: float


MAKING_A_PLAN, ITS_DEVICE, ITS_ACTION = 500, 30, 0.1
"""The cost of making and looking up a plan, in simulated actions; for each device; and of an exact
forward and backward."""

ORDERED, SEARCHED = (1_500, 0.4), (15_000, 3.0)
"""The cost of making an order, and of a micro-batch on a stage in it; and of searching for one. The
orders of the planners' own schedules take no time."""


@dataclass
class Judge:
    """The exact seconds of every plan that was simulated."""

    problem: PlanningProblem
    score: Score
    seconds: dict[Plan, float] = field(default_factory=dict[Plan, float])
    leaders: dict[str, tuple[float, Plan]] = field(default_factory=dict[str, tuple[float, Plan]])

    def simulate(self, plan: Plan) -> float:
        """Return seconds of a plan: infinite where it does not fit, or its schedule refuses it."""
        if plan not in self.seconds:
            self.seconds[plan] = score_of(plan, self.score)
        seconds = self.seconds[plan]
        if seconds < self.leaders.get(plan.schedule, (inf,))[0]:
            self.leaders[plan.schedule] = seconds, plan
        return seconds

    def best_of(self, schedules: Collection[str]) -> tuple[float, Plan | None]:
        """Return the fastest plan under some schedules; infinite seconds where there is none."""
        found = [self.leaders[name] for name in schedules if name in self.leaders]
        return min(found, key=lambda one: one[0], default=(inf, None))

    @property
    def best_s(self) -> float:
        """Seconds of the fastest plan under the allowed schedules."""
        return self.best_of(self.problem.schedules)[0]

    def fastest(self) -> Iterator[tuple[Plan, float]]:
        """Return the plans under the allowed schedules that fit, the fastest first."""
        allowed = self.problem.schedules
        found = ((p, s) for p, s in self.seconds.items() if s < inf and p.schedule in allowed)
        return iter(sorted(found, key=lambda one: one[1]))

    def step(self, doing: str) -> SearchStep:
        """Return a step with the best plan so far."""
        seconds, plan = self.best_of(self.problem.schedules)
        return SearchStep(doing, plan, seconds)


def actions_of(plan: Plan) -> float:
    """Return the cost of simulating a plan, in simulated actions."""
    devices, family = len(plan.devices), FAMILIES[plan.schedule]
    actions = MAKING_A_PLAN + (ITS_DEVICE + ITS_ACTION * plan.micro_batches) * devices
    if family.is_planned:
        return actions
    order, each = SEARCHED if family.is_searched else ORDERED
    return actions + order + each * plan.micro_batches * len(plan.stages)
