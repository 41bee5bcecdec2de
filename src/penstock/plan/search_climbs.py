"""The plans that hill climbing ends in, in the order of their estimates."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

from penstock.plan.candidate import Candidate
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.plan.search_seeds import Climber, Start, device_orders_of, start_of_plan

__all__ = ["climbed_plans", "restarted_plans"]

STARTS_OF_A_DEPTH = 2
"""Even starts climbed from, for each number of stages."""

SHORT_CLIMB = 250
"""Estimates of a first climb from every start."""

LONG_CLIMB = 4000
"""Estimates of a second climb from the best ends of the first."""

LONG_CLIMBS = 8

RESTARTS: tuple[tuple[int, int], ...] = ((96, 300), (24, 1200), (8, 4000))
"""Climbs from random starts, where the bound leaves room for something better: how many of the
best go on, and the estimates that each may spend."""


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


def restarted_plans(problem: PlanningProblem, known: Plan) -> Iterator[Plan]:
    """Plans from random starts around a known plan, the same ones every time.

    Cuts and replica counts are drawn anew; the number of stages and the micro-batch size stay near
    those of ``known``, because the climbs change the first slowly and the second never.
    """
    climber = Climber(problem)
    generator = Random(len(problem.profile.layers))
    devices = len(problem.cluster.devices)
    used = set(known.devices)
    own_order = (*known.devices, *(d for d in range(devices) if d not in used))
    orders = (own_order, *device_orders_of(problem))
    near = near_sizes(problem, known.micro_batch_size)
    starts: list[Start] = []
    ends: list[Start] = []
    for _ in range(RESTARTS[0][0]):
        stages = len(known.stages) + generator.randint(-2, 3)
        stages = max(1, min(stages, climber.most_stages))
        size, way = generator.choice(near), generator.choice(climber.ways())
        order = generator.choice(orders)
        cuts = sorted(generator.sample(range(1, len(problem.profile.layers)), stages - 1))
        marks = sorted(generator.sample(range(1, devices), stages - 1))
        start = Start(
            order, (0, *cuts, len(problem.profile.layers)), (0, *marks, devices), size, way
        )
        if max(b - a for a, b in pairwise(start.starts)) <= size:
            starts.append(start)
    for count, budget in RESTARTS:
        kept = sorted(starts, key=lambda start: climber.estimate(start)[0])[:count]
        starts = [climber.climb(start, int(budget * effort(devices))) for start in kept]
        ends += starts
    return ranked(climber, ends)


def near_sizes(problem: PlanningProblem, size: int) -> tuple[int, ...]:
    """The allowed micro-batch sizes next to one, itself among them."""
    sizes = sorted(problem.micro_batch_sizes)
    at = sizes.index(size)
    return tuple(sizes[max(0, at - 1) : at + 2])


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
    return iter(dict.fromkeys(candidate.plan for candidate in candidates))
