"""Every plan of a small problem, by enumeration, so that the search's answer is optimal there.

Stages have contiguous layers, any devices in any order, any rows, recompute as allowed, and any
depths of the allowed schedules. Of interchangeable devices the earlier ones come first.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem


def every_placement(problem: PlanningProblem) -> Iterator[Plan]:
    """Every cut, device order, row split and micro-batch size, under the first schedule."""
    equal = interchangeable(problem.cluster)
    devices, layers = len(problem.cluster.devices), len(problem.profile.layers)
    most_stages = min(devices, layers, problem.max_stages or layers)
    for size, used in product(problem.micro_batch_sizes, range(1, devices + 1)):
        for order in permutations(range(devices), used):
            if not earlier_first(order, equal):
                continue
            for count in range(1, min(used, most_stages) + 1):
                for inner in combinations(range(1, used), count - 1):
                    bounds = (0, *inner, used)
                    groups = [order[a:b] for a, b in pairwise(bounds)]
                    if max(map(len, groups)) <= size:
                        yield from placements_of(problem, groups, size)


def placements_of(
    problem: PlanningProblem, groups: Sequence[tuple[int, ...]], size: int
) -> Iterator[Plan]:
    """Every cut and row split for given devices of each stage."""
    layers = len(problem.profile.layers)
    micro_batches = problem.global_batch // size
    splits = [tuple(row_splits(size, len(group))) for group in groups]
    if len(groups) == 1 and list(groups[0]) != sorted(groups[0]):
        return
    for cuts in combinations(range(1, layers), len(groups) - 1):
        runs = [range(a, b) for a, b in pairwise((0, *cuts, layers))]
        for rows in product(*splits):
            yield Plan(
                tuple(
                    Stage(run, group, n) for run, group, n in zip(runs, groups, rows, strict=True)
                ),
                micro_batches,
                size,
                problem.schedules[0],
            )


def row_splits(rows: int, replicas: int) -> Iterator[tuple[int, ...]]:
    """All divisions of rows among replicas, each with at least one.

    >>> list(row_splits(3, 2))
    [(1, 2), (2, 1)]
    """
    for inner in combinations(range(1, rows), replicas - 1):
        yield tuple(b - a for a, b in pairwise((0, *inner, rows)))


def every_variant(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    """Every recompute, schedule and depth of a placement; the one with the least memory first."""
    stages, micro_batches = len(plan.stages), plan.micro_batches
    orders: list[tuple[str, tuple[int, ...]]] = []
    for schedule in problem.schedules:
        if schedule == "early-backward":
            depths = falling_depths([micro_batches] * stages)
            orders += [(schedule, depth) for depth in depths]
        elif schedule == "1f1b" and "early-backward" not in problem.schedules:
            most = [min(stages - s, micro_batches) for s in range(stages)]
            orders += [(schedule, depth) for depth in falling_depths(most)]
        elif schedule not in ("1f1b", "gpipe") or "early-backward" not in problem.schedules:
            orders.append((schedule, ()))
    for recompute in product(problem.recompute_choices, repeat=stages):
        chosen = tuple(
            Stage(stage.layers, stage.devices, stage.slices, recomputes)
            for stage, recomputes in zip(plan.stages, recompute, strict=True)
        )
        for schedule, depth in orders:
            yield Plan(
                chosen,
                micro_batches,
                plan.micro_batch_size,
                schedule,
                in_flight_limit=depth,
            )


def falling_depths(most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All depths of at least 1 that never grow downstream, each at most as given.

    >>> list(falling_depths([2, 1]))
    [(1, 1), (2, 1)]
    """
    for depths in product(*(range(1, limit + 1) for limit in most)):
        if all(before >= after for before, after in pairwise(depths)):
            yield depths


def interchangeable(cluster: Cluster) -> tuple[int, ...]:
    """The first device with which each device could be exchanged without any effect."""
    devices = range(len(cluster.devices))

    def equal(x: int, y: int) -> bool:
        others = [z for z in devices if z not in (x, y)]
        pairs = [((x, z), (y, z)) for z in others] + [((z, x), (z, y)) for z in others]
        pairs.append(((x, y), (y, x)))
        return (
            cluster.devices[x] == cluster.devices[y]
            and cluster.host_index[x] == cluster.host_index[y]
            and all(
                cluster.bandwidth(*p) == cluster.bandwidth(*q)
                and cluster.latency(*p) == cluster.latency(*q)
                for p, q in pairs
            )
        )

    return tuple(next(x for x in devices if x == y or equal(x, y)) for y in devices)


def earlier_first(order: Sequence[int], equal: Sequence[int]) -> bool:
    """Return whether of interchangeable devices the earlier come first, with none left out."""
    seen: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for device, first in enumerate(equal):
        members.setdefault(first, []).append(device)
    for device in order:
        kind = equal[device]
        if members[kind][seen.get(kind, 0)] != device:
            return False
        seen[kind] = seen.get(kind, 0) + 1
    return True
