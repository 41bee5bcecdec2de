"""Planners and schedules against one another, on one problem."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.document import Json
from penstock.errors import Infeasible
from penstock.plan.problem import PlanningProblem
from penstock.plan.registry import PLANNERS
from penstock.planning.answers import find_plan
from penstock.planning.assessment import PlannedPipeline, assess_plan, baselines_of
from penstock.planning.questions import named
from penstock.schedule.registry import SCHEDULES
from penstock.simulate.score import make_score

__all__ = ["Comparison", "compare_plans", "require_a_plan"]


@dataclass(frozen=True)
class Comparison:
    """What a planner made of a problem with one schedule."""

    planner: str
    schedule: str
    outcome: PlannedPipeline | Infeasible
    planning_s: float

    def to_json(self) -> dict[str, Json]:
        """The plan's keys, or the reason why there is no plan."""
        match self.outcome:
            case PlannedPipeline() as planned:
                names: dict[str, Json] = {"planner": self.planner, "schedule": self.schedule}
                return planned.to_json(self.planning_s) | names
            case Infeasible() as refusal:
                return {
                    "planner": self.planner,
                    "schedule": self.schedule,
                    "infeasible": str(refusal),
                }


def compare_plans(
    problem: PlanningProblem,
    planners: Sequence[str],
    schedules: Sequence[str],
    clock: Callable[[], float],
) -> Iterator[Comparison]:
    """Every planner with every schedule, in order.

    Raises:
        BadInput: an unknown planner or schedule.
    """
    for planner in planners:
        named(PLANNERS, planner, "planner")
    for schedule in schedules:
        named(SCHEDULES, schedule, "schedule")
    baselines = baselines_of(problem, make_score(problem))
    for schedule in schedules:
        narrowed = replace(problem, schedules=(schedule,))
        score = make_score(narrowed)
        for planner in planners:
            start_s = clock()
            outcome: PlannedPipeline | Infeasible
            try:
                plan = find_plan(narrowed, planner, score)
                outcome = assess_plan(plan, problem, baselines)
            except Infeasible as refusal:
                outcome = refusal
            yield Comparison(planner, schedule, outcome, clock() - start_s)


def require_a_plan(comparisons: Sequence[Comparison]) -> None:
    """Raise the first refusal where no planner found a plan.

    Raises:
        Infeasible: nothing fits; the message says what would.
    """
    refusals = [c.outcome for c in comparisons if isinstance(c.outcome, Infeasible)]
    if refusals and len(refusals) == len(comparisons):
        raise refusals[0]
