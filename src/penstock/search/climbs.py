"""The plans that hill climbing ends in, in the order of their estimates."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from numpy.random import Generator, default_rng

from penstock.plan.candidate import Candidate
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.dynamic_program import known_candidates
from penstock.search.seeds import Climber, Start, device_orders_of, start_of_plan

__all__ = ["climbed_plans", "restarted_plans"]

STARTS_OF_A_DEPTH = 2
"""Even starts climbed from, for each number of stages."""

TABLE_STARTS = 24
"""The most plans of the dynamic program that are climbed from."""

SHORT_CLIMB = 400
"""Estimates of a first climb from every start."""

LONG_CLIMB = 2500
"""Estimates of a second climb from the best ends of the first."""

LONG_CLIMBS = 8

RESTARTS, RESTART_CLIMB = 8, 1000
"""Climbs from random starts, where the bound leaves room for something better; and the estimates
that each may spend."""

KICKED, KICKS, KICK_CLIMB = 2, 25, 800
"""The best ends are changed at random and climbed from again, so many of them so many times."""


LEAST_REPEATS, MOST_REPEATS, ACTIONS = 0.7, 4.0, 1e8
"""Random starts and kicks are that many times fewer or more, so that the estimates play about
``ACTIONS`` forwards and backwards in all: some seconds."""


def repeats(problem: PlanningProblem, known: Plan) -> float:
    """How many times the usual number of random starts and kicks a problem like this is worth."""
    played = 2 * len(known.stages) * min(known.micro_batches, 6 * len(known.stages) + 20)
    looked_at = 5 * len(problem.profile.layers)
    estimates = RESTARTS * RESTART_CLIMB + KICKED * KICKS * KICK_CLIMB
    return min(MOST_REPEATS, max(LEAST_REPEATS, ACTIONS / estimates / (played + looked_at)))


def effort(devices: int) -> float:
    """The part of the climbs' estimates that many devices are worth, where each takes longer.

    >>> effort(8), effort(256)
    (1.0, 0.25)
    """
    return (16 / max(16, devices)) ** 0.5


def climbed_plans(climber: Climber, known: Plan | None) -> Iterator[Iterator[Plan]]:
    """Two batches of plans: from the best known plan, then from starts of every depth and size.

    The latter are the dynamic program's plans, and even ones.
    """
    part = effort(len(climber.problem.cluster.devices))
    short, long = int(SHORT_CLIMB * part), int(LONG_CLIMB * part)
    if known is not None:
        yield ranked(climber, climber.climb_all(starts_of(climber, known), long))
    starts = [*table_starts(climber), *even_starts(climber, known)]
    ends = climber.climb_all(starts, short)
    ends.sort(key=lambda start: climber.estimate(start)[0])
    yield ranked(climber, [*climber.climb_all(ends[:LONG_CLIMBS], long), *ends])


def starts_of(climber: Climber, plan: Plan) -> list[Start]:
    """A plan as a start, with every choice of depths; the best estimate first."""
    devices = len(climber.problem.cluster.devices)
    starts = [start_of_plan(plan, devices, way) for way in climber.ways()]
    return sorted(starts, key=lambda start: climber.estimate(start)[0])


def table_starts(climber: Climber) -> list[Start]:
    """The dynamic program's best plan of each micro-batch size and number of stages."""
    best: dict[tuple[int, int], Plan] = {}
    for candidate in sorted(known_candidates(climber.problem), key=lambda each: each.estimate_s):
        plan = candidate.plan
        best.setdefault((plan.micro_batch_size, len(plan.stages)), plan)
    starts = [starts_of(climber, plan)[0] for plan in best.values()]
    starts.sort(key=lambda start: climber.estimate(start)[0])
    return starts[: int(TABLE_STARTS * effort(len(climber.problem.cluster.devices)))]


def restarted_plans(climber: Climber, known: Plan, seed: int = 0) -> Iterator[Plan]:
    """Plans from random starts around a known plan, and from kicks to it and the best of those.

    The same ones for the same ``seed``.
    Cuts and replica counts are drawn anew; the number of stages and the micro-batch size stay near
    those of ``known``, because the climbs change the first slowly and the second never.
    """
    problem = climber.problem
    generator = default_rng([len(problem.profile.layers), seed])
    part = effort(len(problem.cluster.devices))
    often = repeats(problem, known)
    starts = random_starts(climber, known, generator, round(RESTARTS * often))
    ends = climber.climb_all(starts, int(RESTART_CLIMB * part))
    ends.sort(key=lambda start: climber.estimate(start)[0])
    best = [starts_of(climber, known)[0], *ends[: KICKED - 1]]
    for _ in range(round(KICKS * often)):
        # Side by side, each from the best that it has led to.
        trials = [kicked(end, generator) for end in best]
        for place, end in enumerate(climber.climb_all(trials, int(KICK_CLIMB * part))):
            if climber.estimate(end)[0] < climber.estimate(best[place])[0]:
                best[place] = end
                ends.append(end)
    return ranked(climber, ends)


def random_starts(
    climber: Climber, known: Plan, generator: Generator, count: int
) -> Iterator[Start]:
    """Up to ``count`` random cuts and replica counts, of about as many stages as ``known``."""
    problem = climber.problem
    layers, devices = len(problem.profile.layers), len(problem.cluster.devices)
    used = set(known.devices)
    own_order = (*known.devices, *(d for d in range(devices) if d not in used))
    orders = (own_order, *device_orders_of(problem))
    near, ways = near_sizes(problem, known.micro_batch_size), climber.ways()
    for _ in range(count):
        stages = len(known.stages) + int(generator.integers(-2, 4))
        stages = max(1, min(stages, climber.most_stages))
        size = near[generator.integers(len(near))]
        way = ways[generator.integers(len(ways))]
        order = orders[generator.integers(len(orders))]
        cuts = drawn_cuts(generator, layers, stages)
        marks = drawn_cuts(generator, devices, stages)
        if max(b - a for a, b in pairwise(marks)) <= size:
            yield Start(order, cuts, marks, size, way)


def drawn_cuts(generator: Generator, length: int, parts: int) -> tuple[int, ...]:
    """Where a random division of ``length`` things in so many parts begins and ends."""
    inner = generator.permutation(length - 1)[: parts - 1] + 1
    return (0, *sorted(int(cut) for cut in inner), length)


def kicked(start: Start, generator: Generator) -> Start:
    """A start with two cuts drawn anew, and a few devices moved between two stages."""
    cuts, marks = list(start.cuts), list(start.starts)
    if start.stages == 1:
        return start
    for _ in range(2):
        cut = int(generator.integers(1, start.stages))
        cuts[cut] = int(generator.integers(cuts[cut - 1] + 1, cuts[cut + 1]))
    giver, taker = (int(stage) for stage in generator.permutation(start.stages)[:2])
    width = marks[giver + 1] - marks[giver]
    room = start.micro_batch_size - (marks[taker + 1] - marks[taker])
    moved = max(0, min(width - 1, int(generator.integers(1, 3)), room))
    for stage in range(start.stages + 1):
        marks[stage] += moved * ((stage > taker) - (stage > giver))
    return replace(start, cuts=tuple(cuts), starts=tuple(marks))


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
