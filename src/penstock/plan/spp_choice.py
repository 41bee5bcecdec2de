"""The best of a few plans by the simulator, where a planner's own formula has sorted them."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from penstock.plan.bounds import plan_bound_s
from penstock.plan.candidate import Candidate
from penstock.plan.infeasible import infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score

__all__ = ["best_of_few"]

MOST_ACTIONS = 16_384
"""Pipelines with more forwards than this (stages times micro-batches) are tried last."""


def best_of_few(
    problem: PlanningProblem,
    candidates: Iterable[Candidate],
    score: Score,
    *,
    planner: str,
    tries: int,
) -> Plan:
    """The plan with the least score among the ``tries`` candidates with the least estimates.

    Candidates that do not fit do not count as tries, and neither do those whose proven bound is
    not below the best score so far. Longer orders of work than `MOST_ACTIONS` come last, because
    making and playing them takes long; of equal scores the first wins.

    Raises:
        Infeasible: no candidate has a finite score.
    """
    best, best_s, tried = None, inf, 0
    for candidate in sorted(candidates, key=effort_and_estimate):
        if best is not None and plan_bound_s(problem, candidate.plan) >= best_s:
            continue
        seconds = score(candidate.plan)
        if seconds < best_s:
            best, best_s = candidate.plan, seconds
        tried += seconds < inf
        if tried >= tries:
            break
    if best is None:
        raise infeasible(problem, planner)
    return replace(best, planner=planner)


def effort_and_estimate(candidate: Candidate) -> tuple[bool, float]:
    """What candidates are sorted by."""
    plan = candidate.plan
    return len(plan.stages) * plan.micro_batches > MOST_ACTIONS, candidate.estimate_s
