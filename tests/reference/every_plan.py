"""Every plan of a small problem, by enumeration."""

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.row_split import split_rows


def every_plan(problem: PlanningProblem, order: tuple[int, ...]) -> Iterator[Plan]:
    """Contiguous stages on consecutive devices of ``order``, rows by speed, any recompute."""
    choices = {"auto": (False, True), "on": (True,), "off": (False,)}[problem.recompute]
    layers = len(problem.profile.layers)
    for size, schedule in product(problem.micro_batch_sizes, problem.schedules):
        for stages in range(1, min(layers, len(order)) + 1):
            for cuts in combinations(range(1, layers), stages - 1):
                for ends in combinations(range(len(order) + 1), stages + 1):
                    widths = [hi - lo for lo, hi in pairwise(ends)]
                    if max(widths) > size:
                        continue
                    for recompute in product(choices, repeat=stages):
                        yield Plan(
                            stages=tuple(
                                stage(problem, order[lo:hi], range(start, stop), size, again)
                                for lo, hi, start, stop, again in zip(
                                    ends,
                                    ends[1:],
                                    (0, *cuts),
                                    (*cuts, layers),
                                    recompute,
                                    strict=False,
                                )
                            ),
                            micro_batches=problem.global_batch // size,
                            micro_batch_size=size,
                            schedule=schedule,
                        )


def stage(
    problem: PlanningProblem, devices: tuple[int, ...], layers: range, size: int, recompute: bool
) -> Stage:
    """One stage with rows in proportion to speed."""
    speeds = [problem.cluster.devices[device].speed for device in devices]
    return Stage(layers, devices, split_rows(size, speeds), recompute)
