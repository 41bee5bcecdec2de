"""The best of many candidate plans, by the simulator's score."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from penstock.costs.infeasible import infeasible
from penstock.costs.lower_bound import plan_bound_s
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, and the seconds of its iteration by the formula of the planner that made it."""

    plan: Plan
    estimate_s: float


PATIENCE = 60
"""Candidates without an improvement after which the rest is not tried."""

PATIENCE_IN_ACTIONS = 2_000_000
"""Simulated actions without an improvement after which the rest is not tried."""

MOST_ACTIONS = 16_384
"""Forwards (stages times micro-batches) beyond which candidates come last, where only a few are
tried: making and simulating their orders takes long."""


def best_candidate(
    problem: PlanningProblem,
    candidates: Iterable[Candidate],
    score: Score,
    *,
    planner: str,
    tries: int = 0,
) -> Plan:
    """The plan with the least score; of equal ones that with the least estimate, then the first.

    Candidates are tried in order of their estimates, until `PATIENCE` of them in a row are no
    better (fewer where each takes long to simulate). Those whose proven bound is not below the best
    score so far are left out, because they cannot win. With ``tries`` only that many candidates of
    every micro-batch size are tried, and the others only if none of those fits. Many estimates
    compare plans of one size well, but not plans of different sizes.
    """
    best, best_s = None, inf
    tried_since = actions_since = 0
    for is_late, candidate in few_first(candidates, tries):
        if best is not None and (is_late or plan_bound_s(problem, candidate.plan) >= best_s):
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


def few_first(candidates: Iterable[Candidate], tries: int) -> Iterator[tuple[bool, Candidate]]:
    """All candidates, the most promising first; each with whether it comes last."""
    ordered = sorted(candidates, key=lambda candidate: candidate.estimate_s)
    tried: Counter[int] = Counter()
    late: list[Candidate] = []
    for candidate in ordered:
        plan = candidate.plan
        is_long = len(plan.stages) * plan.micro_batches > MOST_ACTIONS
        if tries and (is_long or tried[plan.micro_batch_size] == tries):
            late.append(candidate)
            continue
        tried[plan.micro_batch_size] += 1
        yield False, candidate
    yield from ((True, candidate) for candidate in late)
