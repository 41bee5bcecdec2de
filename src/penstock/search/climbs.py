"""The plans that hill climbing ends in, in the order of their estimates."""

from collections.abc import Iterator, Sequence

from penstock.plan.candidate import Candidate
from penstock.plan.plan import Plan
from penstock.planners.dynamic_program import known_candidates
from penstock.search.seeds import Climber, Start, device_orders_of, start_of_plan

__all__ = ["climbed_plans"]

STARTS_OF_A_DEPTH = 2
"""Even starts climbed from, for each number of stages."""

TABLE_STARTS = 24
"""The most plans of the dynamic program that are climbed from."""

SHORT_CLIMB = 400
"""Estimates of a first climb from every start."""

LONG_CLIMB = 2500
"""Estimates of a second climb from the best ends of the first."""

LONG_CLIMBS = 8


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
