"""Every plan of a small problem, by enumeration."""

from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise, permutations, product

from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.row_split import split_rows

CHOICES = {"auto": (False, True), "on": (True,), "off": (False,)}


def every_plan(problem: PlanningProblem, order: tuple[int, ...]) -> Iterator[Plan]:
    """Contiguous stages on consecutive devices of ``order``, rows by speed, any recompute."""
    layers = len(problem.profile.layers)
    for size, schedule in product(problem.micro_batch_sizes, problem.schedules):
        for stages in range(1, min(layers, len(order)) + 1):
            for cuts in combinations(range(1, layers), stages - 1):
                for ends in combinations(range(len(order) + 1), stages + 1):
                    widths = [hi - lo for lo, hi in pairwise(ends)]
                    if max(widths) > size:
                        continue
                    windows = [order[lo:hi] for lo, hi in pairwise(ends)]
                    slices = [by_speed(problem, devices, size) for devices in windows]
                    for again in product(CHOICES[problem.recompute], repeat=stages):
                        yield plan_of(problem, cuts, windows, slices, again, schedule)


def every_plan_at_all(problem: PlanningProblem) -> Iterator[Plan]:
    """Every plan: any disjoint devices in any order, any slices, recompute, schedule and depths.

    The depths of 'early-backward' are all that do not grow from one stage to the next; with them
    the other schedules of its family add nothing, so they are only tried where it is not allowed.
    """
    most = len(problem.cluster.devices)
    for size in problem.micro_batch_sizes:
        for stages in range(1, min(len(problem.profile.layers), most) + 1):
            if problem.max_stages and stages > problem.max_stages:
                break
            for groups in device_groups(tuple(range(most)), stages):
                if max(map(len, groups)) > size:
                    continue
                yield from plans_on(problem, size, groups)


def plans_on(
    problem: PlanningProblem, size: int, groups: tuple[tuple[int, ...], ...]
) -> Iterator[Plan]:
    """The plans whose stages stand on these groups of devices."""
    stages = len(groups)
    cuts = list(combinations(range(1, len(problem.profile.layers)), stages - 1))
    slices = list(product(*(compositions(size, len(group)) for group in groups)))
    again = list(product(CHOICES[problem.recompute], repeat=stages))
    for cut, rows, recompute in product(cuts, slices, again):
        for schedule, depths in orders(problem, stages, problem.global_batch // size):
            yield plan_of(problem, cut, groups, rows, recompute, schedule, depths)


def orders(
    problem: PlanningProblem, stages: int, batches: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Schedules with their depths."""
    if "early-backward" not in problem.schedules:
        yield from ((schedule, ()) for schedule in problem.schedules)
        return
    for depths in product(range(batches, 0, -1), repeat=stages):
        if all(a >= b for a, b in pairwise(depths)):
            yield "early-backward", depths


def device_groups(devices: tuple[int, ...], stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every sequence of disjoint groups, each in every order."""
    if stages == 0:
        yield ()
        return
    for width in range(1, len(devices) - stages + 2):
        for group in permutations(devices, width):
            left = tuple(device for device in devices if device not in group)
            for others in device_groups(left, stages - 1):
                yield (group, *others)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as so many positive numbers, in order."""
    for ends in combinations(range(1, total), parts - 1):
        yield tuple(hi - lo for lo, hi in pairwise((0, *ends, total)))


def plan_of(
    problem: PlanningProblem,
    cuts: tuple[int, ...],
    groups: Iterable[tuple[int, ...]],
    slices: Iterable[tuple[int, ...]],
    recompute: tuple[bool, ...],
    schedule: str,
    depths: tuple[int, ...] = (),
) -> Plan:
    """The plan with these choices."""
    bounds = (0, *cuts, len(problem.profile.layers))
    stages = tuple(
        Stage(range(start, stop), devices, rows, again)
        for (start, stop), devices, rows, again in zip(
            pairwise(bounds), groups, slices, recompute, strict=True
        )
    )
    size = sum(stages[0].slices)
    return Plan(stages, problem.global_batch // size, size, schedule, in_flight_limit=depths)


def by_speed(problem: PlanningProblem, devices: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Rows in proportion to speed."""
    return split_rows(size, [problem.cluster.devices[device].speed for device in devices])
