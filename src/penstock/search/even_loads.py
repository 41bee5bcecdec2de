"""Plans whose devices, engines and ports are loaded evenly."""

from collections.abc import Iterator
from math import inf

import numpy as np

from penstock.kernels import compiled
from penstock.plan.cost import rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.search.plan_load import Layout
from penstock.search.random_walk import Walk, random_walk
from penstock.search.search_arrays import search_arrays

__all__ = ["evenly_loaded_plans", "layout_of"]

POWERS = (0.0, 30.0, 10.0)
"""Powers of `load_s`: 0 counts only the fullest resource; lower ones count others more."""

STEPS, FEW_DEVICES = 100_000, 16
"""Plans of a walk; on a small cluster they take about half a second. On more devices, where each
plan takes longer, there are fewer."""

HEAT = 0.05
"""By which share slower plans are accepted at first."""

KEPT = 6
"""The plans of a walk that are simulated; they differ in micro-batch size or number of stages."""


def evenly_loaded_plans(problem: PlanningProblem, start: Plan, seed: int) -> Iterator[Plan]:
    """The best plans of walks from ``start`` that compare loads, best first in each walk.

    A load knows no order of work: depth, recompute and schedule are still to be chosen.
    """
    sizes = np.array(sorted(problem.micro_batch_sizes), dtype=np.int64)
    devices = len(problem.cluster.devices)
    walk = Walk(
        sizes=sizes,
        first=int(np.searchsorted(sizes, start.micro_batch_size)),
        batch=problem.global_batch,
        recompute={"off": 0, "auto": 1, "on": 2}[problem.recompute],
        power=0.0,
        heat=HEAT,
        steps=int(STEPS * (FEW_DEVICES / max(FEW_DEVICES, devices)) ** 0.5),
        seed=seed,
    )
    arrays, layout = search_arrays(problem), layout_of(problem, start)
    most = len(layout.cuts) - 1
    for power in POWERS:
        found = Layout(*(np.zeros((len(sizes) * most, len(part)), np.int64) for part in layout))
        found_s = compiled(random_walk)(arrays, layout, walk._replace(power=power), found)
        for number in np.argsort(found_s)[:KEPT].tolist():
            if found_s[number] < inf:
                yield plan_of(problem, found, number, int(sizes[number // most]))


def layout_of(problem: PlanningProblem, plan: Plan) -> Layout:
    """A plan as arrays; devices that it does not use come last."""
    devices, layers = len(problem.cluster.devices), len(problem.profile.layers)
    most = min(layers, devices, problem.max_stages or layers)
    used, stages = plan.devices, len(plan.stages)
    order = [*used, *(device for device in range(devices) if device not in set(used))]
    cuts, starts = np.full((2, most + 1), layers, dtype=np.int64)
    cuts[1 : stages + 1] = [stage.layers.stop for stage in plan.stages]
    starts[1 : stages + 1] = np.cumsum([stage.replicas for stage in plan.stages])
    cuts[0] = starts[0] = 0
    return Layout(np.array(order, dtype=np.int64), cuts, starts, np.array([stages]))


def plan_of(problem: PlanningProblem, found: Layout, number: int, size: int) -> Plan:
    """The plan of one of several layouts, under the first schedule."""
    order, cuts, starts, stages = (part[number].tolist() for part in found)
    made: list[Stage] = []
    for s in range(*stages):
        devices = tuple(order[starts[s] : starts[s + 1]])
        rows = rows_by_speed(problem.cluster, devices, size)
        made.append(Stage(range(cuts[s], cuts[s + 1]), devices, rows))
    return Plan(tuple(made), problem.global_batch // size, size, problem.schedules[0])
