"""Simulates plans, each once, and knows the fastest under every schedule."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import inf

from penstock.bounds.lower_bound import plan_bound_s
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score, score_of
from penstock.plan.schedule_costs import load_s
from penstock.schedule.registry import FAMILIES


@dataclass(frozen=True, slots=True)
class SearchStep:
    """What is being done, and the best plan so far with its seconds; before, None and infinite."""

    doing: str
    plan: Plan | None
    seconds: float


MAKING_A_PLAN, ITS_DEVICE = 500, 30
"""Making and looking up a plan counts as so many simulated actions, and so many for each device."""

ORDERED = 4
"""Making the order of an action takes this many times as long as simulating it. The orders of the
planners' own schedules take no time."""

NEAR = 1.1
"""How many times as long as the best plan one may take, by its time, load or bound, to be improved
too: moves may still gain that. For the load of skeletons 1.0 was too little on a random problem."""

LEADING = 6
"""How many of the fastest plans lead."""


@dataclass
class Judge:
    """The seconds of every plan that was simulated, under the ``allowed`` schedules and others.

    The schedules of ``problem`` are those for which planners choose stages. Where none of them is
    allowed, their plans are no answers, but others start from them.
    """

    problem: PlanningProblem
    allowed: tuple[str, ...]
    score: Score
    seconds: dict[Plan, float] = field(default_factory=dict[Plan, float])
    leaders: dict[str, tuple[float, Plan]] = field(default_factory=dict[str, tuple[float, Plan]])

    def simulate(self, plan: Plan) -> float:
        """Seconds of a plan; infinite where it does not fit, or its schedule refuses it."""
        if plan not in self.seconds:
            self.seconds[plan] = score_of(plan, self.score)
        seconds = self.seconds[plan]
        if seconds < self.leaders.get(plan.schedule, (inf,))[0]:
            self.leaders[plan.schedule] = seconds, plan
        return seconds

    def best_of(self, schedules: Collection[str]) -> tuple[float, Plan | None]:
        """The fastest plan under some schedules, with its seconds; infinite where there is none."""
        found = [self.leaders[name] for name in schedules if name in self.leaders]
        return min(found, key=lambda one: one[0], default=(inf, None))

    @property
    def best_s(self) -> float:
        """Seconds of the fastest plan under the allowed schedules."""
        return self.best_of(self.allowed)[0]

    @property
    def whole(self) -> tuple[float, Plan | None]:
        """The fastest plan under the schedules of ``problem``, with its seconds."""
        return self.best_of(self.problem.schedules)

    def may_be_faster(self, plan: Plan, than_s: float) -> bool:
        """Whether no bound shows that the plan takes at least so long."""
        if FAMILIES[plan.schedule].is_planned:
            return plan_bound_s(self.problem, plan) < than_s
        return not plan.costs or load_s(plan) < than_s

    def fastest(self, schedules: Collection[str]) -> Iterator[tuple[Plan, float]]:
        """The plans under some schedules that fit, the fastest first."""
        found = ((p, s) for p, s in self.seconds.items() if s < inf and p.schedule in schedules)
        return iter(sorted(found, key=lambda one: one[1]))

    def leading(self, schedules: Collection[str]) -> list[Plan]:
        """The fastest plans under some schedules that differ in their numbers of replicas."""
        found: dict[object, Plan] = {}
        for plan, _ in self.fastest(schedules):
            found.setdefault(tuple(map(len, plan.device_groups)), plan)
            if len(found) == LEADING:
                break
        return list(found.values())

    def step(self, doing: str) -> SearchStep:
        """A step with the best plan so far."""
        seconds, plan = self.best_of(self.allowed)
        return SearchStep(doing, plan, seconds)


def judge_of(problem: PlanningProblem, score: Score) -> Judge:
    """The judge of a problem, before anything was simulated."""
    own = tuple(name for name in problem.schedules if name in PlanningProblem.schedules)
    own = own or tuple(name for name in problem.schedules if FAMILIES[name].is_planned)
    if own != problem.schedules:
        return Judge(problem.under(own or PlanningProblem.schedules), problem.schedules, score)
    return Judge(problem, problem.schedules, score)


def actions_of(plan: Plan) -> int:
    """The cost of simulating a plan, in simulated actions."""
    devices = len(plan.devices)
    actions = MAKING_A_PLAN + (ITS_DEVICE + plan.micro_batches) * devices
    if FAMILIES[plan.schedule].is_planned:
        return actions
    return actions + ORDERED * plan.micro_batches * len(plan.stages)
