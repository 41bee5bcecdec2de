"""The default planner: starts from what the others make, and is judged by the simulator."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from penstock.errors import Infeasible
from penstock.plan.infeasible import infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import Planner, PlanningProblem, Score
from penstock.plan.search_step import SearchStep

__all__ = ["search_from", "search_steps"]


def search_from(starts: Mapping[str, Planner]) -> Planner:
    """The planner that runs `search_steps` to the end."""

    def search(problem: PlanningProblem, score: Score) -> Plan:
        best: Plan | None = None
        for step in search_steps(problem, score, starts):
            best = step.plan
        if best is None:
            raise infeasible(problem, "search")
        return best

    return search


def search_steps(
    problem: PlanningProblem, score: Score, starts: Mapping[str, Planner]
) -> Iterator[SearchStep]:
    """Ever better plans, each with what is being tried; the last step has the best of all.

    ``starts`` are the planners whose plans are improved on, so the answer is never worse than any
    of theirs under the same score; of equal ones it is that on the fewest devices. The last step
    has no plan where nothing fits.
    """
    best = SearchStep("", None, inf)
    for name, planner in starts.items():
        yield replace(best, doing=f"planner {name}")
        try:
            plan = planner(problem, score)
        except Infeasible:
            continue
        rank = (score(plan), len(plan.devices))
        if best.plan is None or rank < (best.seconds, len(best.plan.devices)):
            best = SearchStep(best.doing, replace(plan, planner="search"), rank[0])
    yield replace(best, doing="done")
