"""On problems small enough to try every plan, none is better than what `search` finds."""

from math import inf

import pytest
from bound_strategies import bound_problems
from hypothesis import given, settings
from reference.every_plan import every_plan_at_all

from penstock.errors import Infeasible
from penstock.plan.problem import PlanningProblem
from penstock.planners.search.search import PLANNERS
from penstock.simulate.score import make_score


@settings(max_examples=12, deadline=None)
@given(problem=bound_problems())
def test_search_reaches_the_least_time_of_every_plan(problem: PlanningProblem):
    score = make_score(problem)
    best_s = min(map(score, every_plan_at_all(problem)), default=inf)
    try:
        found_s = score(PLANNERS["search"](problem, score))
    except Infeasible:
        found_s = inf
    assert found_s == pytest.approx(best_s, rel=1e-9)
