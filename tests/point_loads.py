"""Plans as points of the core with the loads of these."""

from penstock.core import native
from penstock.core.native import LoadQuestion, Point, PointRules
from penstock.costs.tables import search_costs
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.search.points import point_of, rules_of


def straight(problem: PlanningProblem, plan: Plan) -> tuple[PointRules, Point]:
    """Return a plan with one stage a group as a point."""
    rules = rules_of(problem, ("1f1b",), "straight", 1, split=False)
    point = point_of(problem, rules, plan)
    assert point is not None
    return rules, point


def question(problem: PlanningProblem, power: float = 0.0, *, steady: bool = False) -> LoadQuestion:
    """Return the question for a load with the recompute that a problem allows."""
    return LoadQuestion({"off": 0, "auto": 1, "on": 2}[problem.recompute], power, steady)


def load_of(
    problem: PlanningProblem, plan: Plan, power: float = 0.0, *, steady: bool = False
) -> float:
    """Return the load of a plan with one stage a group."""
    rules, point = straight(problem, plan)
    asked = question(problem, power, steady=steady)
    return native.load_s(search_costs(problem), rules, point, asked)
