"""The best of many candidate plans, by the simulator's score."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from penstock.bounds.lower_bound import plan_bound_s
from penstock.plan.candidate import Candidate
from penstock.plan.infeasible import infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score

__all__ = ["best_candidate"]

PATIENCE = 60
"""Candidates without an improvement after which the rest is not tried."""

PATIENCE_IN_ACTIONS = 2_000_000
"""Simulated actions without an improvement after which the rest is not tried."""


def best_candidate(
    problem: PlanningProblem, candidates: Iterable[Candidate], score: Score, *, planner: str
) -> Plan:
    """The plan with the least score; of equal ones that with the least estimate, then the first.

    Candidates are tried in order of their estimates, until `PATIENCE` have brought nothing better
    (fewer where each takes long to simulate).
    Left out are those whose proven bound is not below the best score so far: they could not win.

    Raises:
        Infeasible: no candidate has a finite score.
    """
    best, best_s = None, inf
    tried_since = actions_since = 0
    for candidate in sorted(candidates, key=lambda candidate: candidate.estimate_s):
        if plan_bound_s(problem, candidate.plan) >= best_s:
            continue
        seconds = score(candidate.plan)
        tried_since += 1
        actions_since += 2 * candidate.plan.micro_batches * len(candidate.plan.devices)
        if seconds < best_s:
            best, best_s, tried_since, actions_since = candidate.plan, seconds, 0, 0
        patient = tried_since < PATIENCE and actions_since < PATIENCE_IN_ACTIONS
        if best is not None and not patient:
            break
    if best is None:
        raise infeasible(problem, planner)
    return replace(best, planner=planner)
