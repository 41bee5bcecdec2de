"""The best of many candidate plans, by the simulator's score."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from penstock.plan.bounds import plan_bound_s
from penstock.plan.candidate import Candidate
from penstock.plan.infeasible import infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score

__all__ = ["best_candidate"]


def best_candidate(
    problem: PlanningProblem, candidates: Iterable[Candidate], score: Score, *, planner: str
) -> Plan:
    """The plan with the least score; of equal ones that with the least estimate, then the first.

    Candidates are tried in order of their estimates, and those left out whose proven bound is not
    below the best score so far: they could not win.

    Raises:
        Infeasible: no candidate has a finite score.
    """
    best, best_s = None, inf
    for candidate in sorted(candidates, key=lambda candidate: candidate.estimate_s):
        if plan_bound_s(problem, candidate.plan) >= best_s:
            continue
        seconds = score(candidate.plan)
        if seconds < best_s:
            best, best_s = candidate.plan, seconds
    if best is None:
        raise infeasible(problem, planner)
    return replace(best, planner=planner)
