"""The best of a few plans by the simulator, where a planner's own formula has sorted them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

from penstock.bounds.lower_bound import plan_bound_s
from penstock.plan.candidate import Candidate
from penstock.plan.cost import depths_of, device_memory_bytes
from penstock.plan.infeasible import infeasible
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, Score

__all__ = ["best_of_few", "few_first", "with_needed_recompute"]

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
    """The best of a few candidates: the ``tries`` least estimates of every micro-batch size.

    Estimates compare plans of one size well, and sizes badly, because they let no all-reduce
    overlap a long last backward. Candidates whose proven bound is not below the best score so far
    are left out. Those of more than `MOST_ACTIONS` forwards come last, because making and playing
    them takes long. Of equal scores the first wins. Where none of the few fits, the rest is tried
    until one does.

    Raises:
        Infeasible: no candidate has a finite score.
    """
    best, best_s = None, inf
    for is_late, candidate in few_first(candidates, tries):
        if best is not None and (is_late or plan_bound_s(problem, candidate.plan) >= best_s):
            continue
        seconds = score(candidate.plan)
        if seconds < best_s:
            best, best_s = candidate.plan, seconds
    if best is None:
        raise infeasible(problem, planner)
    return replace(best, planner=planner)


def few_first(candidates: Iterable[Candidate], tries: int) -> Iterator[tuple[bool, Candidate]]:
    """All candidates, those worth a try first; with each whether it is only for want of others."""
    ordered = sorted(candidates, key=lambda candidate: candidate.estimate_s)
    tried: Counter[int] = Counter()
    late: list[Candidate] = []
    for candidate in ordered:
        plan = candidate.plan
        is_long = len(plan.stages) * plan.micro_batches > MOST_ACTIONS
        if is_long or tried[plan.micro_batch_size] == tries:
            late.append(candidate)
            continue
        tried[plan.micro_batch_size] += 1
        yield False, candidate
    yield from ((True, candidate) for candidate in late)


def with_needed_recompute(problem: PlanningProblem, plan: Plan) -> Plan:
    """The plan with recompute on all stages ("on"), on none ("off"), or where it is needed."""
    if problem.recompute == "off":
        return plan
    devices = problem.cluster.devices

    def is_needed(stage: Stage, in_flight: int) -> bool:
        return problem.recompute == "on" or any(
            device_memory_bytes(problem, stage.layers, rows, in_flight=in_flight, recompute=False)
            > devices[device].memory_bytes
            for device, rows in zip(stage.devices, stage.slices, strict=True)
        )

    stages = tuple(
        replace(stage, recompute=is_needed(stage, in_flight))
        for stage, in_flight in zip(plan.stages, depths_of(plan), strict=True)
    )
    return replace(plan, stages=stages)
