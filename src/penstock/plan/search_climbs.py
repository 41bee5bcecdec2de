"""The plans that hill climbing ends in, in the order of their estimates."""

from collections.abc import Iterator, Sequence
from itertools import chain

from penstock.plan.candidate import Candidate
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.plan.search_seeds import Climber, Start, device_orders_of, start_of_plan

__all__ = ["climbed_plans"]

STARTS_OF_A_DEPTH = 2
"""Even starts climbed from, for each number of stages."""

SHORT_CLIMB = 250
"""Estimates of a first climb from every start."""

LONG_CLIMB = 4000
"""Estimates of a second climb from the best ends of the first."""

LONG_CLIMBS = 8


def effort(devices: int) -> float:
    """The part of the climbs' estimates that many devices are worth, where each takes longer.

    >>> effort(8), effort(256)
    (1.0, 0.25)
    """
    return (16 / max(16, devices)) ** 0.5


def climbed_plans(problem: PlanningProblem, known: Plan | None) -> Iterator[Iterator[Plan]]:
    """Two batches of plans: from the best known plan, then from even starts of every depth."""
    climber = Climber(problem)
    devices = len(problem.cluster.devices)
    short, long = int(SHORT_CLIMB * effort(devices)), int(LONG_CLIMB * effort(devices))
    if known is not None:
        starts = [start_of_plan(known, devices, way) for way in climber.ways()]
        yield ranked(climber, [climber.climb(start, long) for start in starts])
    ends = [climber.climb(start, short) for start in even_starts(climber, known)]
    best = sorted(range(len(ends)), key=lambda i: climber.estimate(ends[i])[0])[:LONG_CLIMBS]
    higher = [climber.climb(ends[i], long) for i in best]
    yield ranked(climber, [*higher, *ends])


def even_starts(climber: Climber, known: Plan | None) -> Iterator[Start]:
    """For each number of stages the best even starts."""
    orders = list(device_orders_of(climber.problem))
    if known is not None:
        used = set(known.devices)
        unused = (d for d in range(len(climber.problem.cluster.devices)) if d not in used)
        orders.append((*known.devices, *unused))
    for stages in stage_counts(climber.most_stages):
        yield from (
            start
            for _, start in climber.screened(tuple(dict.fromkeys(orders)), [stages])[
                :STARTS_OF_A_DEPTH
            ]
        )


def stage_counts(most: int) -> Sequence[int]:
    """Numbers of stages to start from: all up to 16, then ever fewer.

    >>> stage_counts(20)
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20)
    """
    counts = list(range(1, min(most, 16) + 1))
    while counts[-1] < most:
        counts.append(min(most, counts[-1] * 5 // 4))
    return tuple(counts)


def ranked(climber: Climber, starts: Sequence[Start]) -> Iterator[Plan]:
    """Their plans, the best estimate first, each once."""
    found: list[Candidate | None] = [climber.candidate(start) for start in dict.fromkeys(starts)]
    candidates = sorted(filter(None, found), key=lambda candidate: candidate.estimate_s)
    return chain(dict.fromkeys(candidate.plan for candidate in candidates))
