"""Plans whose devices, engines and ports are loaded evenly."""

from collections.abc import Iterator
from math import inf
from typing import TypeAlias

import numpy as np

from penstock.kernels import compiled
from penstock.plan.cost import rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.search.arrays import Integers, Reals
from penstock.search.seeds import Climber, start_of_plan
from penstock.search.wander import wander

__all__ = ["evenly_loaded_plans"]

Found: TypeAlias = tuple[Reals, Integers, Integers, Integers, Integers]
"""For each micro-batch size the least load, the number of stages, order, cuts and starts."""

POWERS = (0.0, 30.0, 10.0)
"""What counts: only the fullest resource, or others too, the more the lower the power."""

STEPS = 100_000
"""Plans that a walk looks at; on a small cluster about half a second's work."""

HEAT = 0.05
"""How much slower plans are taken at first."""

KEPT = 4
"""Micro-batch sizes whose best plan is simulated."""


def evenly_loaded_plans(climber: Climber, start: Plan, seed: int) -> Iterator[Plan]:
    """The plans in which walks from ``start`` end that ask for loads alone, best first in each.

    No order of work is looked at: depth, recompute and schedule are still to be chosen.
    """
    problem = climber.problem
    sizes = np.array(sorted(problem.micro_batch_sizes), dtype=np.int64)
    recompute = {"off": 0, "auto": 1, "on": 2}[problem.recompute]
    begin = start_of_plan(start, len(problem.cluster.devices), climber.ways()[0])
    for power in POWERS:
        order, cuts, starts = climber.room(begin)
        found = compiled(wander)(
            climber.arrays, order, cuts, starts, begin.stages, sizes,
            int(np.searchsorted(sizes, begin.micro_batch_size)), problem.global_batch,
            recompute, power, HEAT, STEPS, seed,
        )  # fmt: skip
        for number in np.argsort(found[0])[:KEPT].tolist():
            if found[0][number] < inf:
                yield plan_of_walk(climber, found, number, int(sizes[number]))


def plan_of_walk(climber: Climber, found: Found, number: int, size: int) -> Plan:
    """The plan that a walk found for a micro-batch size."""
    _, stages, order, cuts, starts = (part[number].tolist() for part in found)
    cluster, made = climber.problem.cluster, list[Stage]()
    for s in range(stages):
        devices = tuple(order[starts[s] : starts[s + 1]])
        rows = rows_by_speed(cluster, devices, size)
        made.append(Stage(range(cuts[s], cuts[s + 1]), devices, rows))
    batches = climber.problem.global_batch // size
    return Plan(tuple(made), batches, size, climber.problem.schedules[0])
