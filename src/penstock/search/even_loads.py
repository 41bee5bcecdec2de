"""Plans whose devices, engines and ports are loaded evenly."""

from math import inf

import numpy as np

from penstock.kernels import compiled
from penstock.plan.cost import rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import Floats
from penstock.search.plan_load import Layout, LoadKind
from penstock.search.random_walk import Walk, random_walk
from penstock.search.search_arrays import search_arrays

__all__ = ["evenly_loaded_plans", "layout_of"]

KINDS = (LoadKind(0.0, False), LoadKind(30.0, False), LoadKind(30.0, True), LoadKind(15.0, True))
"""The load that each walk of a round compares."""

STEPS, FEW_DEVICES = 70_000, 16
"""Plans of a walk; on a small cluster they take about a third of a second. On more devices, where
each plan takes longer, there are fewer."""

HEAT = 0.05
"""By which share slower plans are accepted at first."""

KEPT = 8
"""The plans of a walk that are kept; they differ in micro-batch size or number of stages."""


def evenly_loaded_plans(problem: PlanningProblem, start: Plan, seed: int) -> list[Plan]:
    """The best plans of walks from ``start`` that compare loads; the best of each walk come first.

    A load knows no order of work: depth, recompute and schedule are still to be chosen.
    """
    steps = int(STEPS * (FEW_DEVICES / max(FEW_DEVICES, len(problem.cluster.devices))) ** 0.75)
    plans: list[tuple[int, Plan]] = []
    for kind in KINDS:
        found, found_s, sizes = walked(problem, start, kind, steps, seed)
        for place, number in enumerate(np.argsort(found_s)[:KEPT].tolist()):
            if found_s[number] < inf:
                size = sizes[int(number) * len(sizes) // len(found_s)]
                plans.append((place, plan_of(problem, found, number, size)))
    plans.sort(key=lambda one: one[0])
    return list(dict.fromkeys(plan for _, plan in plans))


def walked(
    problem: PlanningProblem, start: Plan, kind: LoadKind, steps: int, seed: int
) -> tuple[Layout, Floats, list[int]]:
    """Layouts that a walk has found, with their loads; and the micro-batch sizes in their order."""
    sizes = sorted(problem.micro_batch_sizes)
    walk = Walk(
        sizes=np.array(sizes, dtype=np.int64),
        first=sizes.index(start.micro_batch_size),
        batch=problem.global_batch,
        recompute={"off": 0, "auto": 1, "on": 2}[problem.recompute],
        kind=kind,
        heat=HEAT,
        steps=steps,
        seed=seed,
    )
    layout = layout_of(problem, start)
    places = len(sizes) * (len(layout.cuts) - 1)
    found = Layout(*(np.zeros((places, len(part)), np.int64) for part in layout))
    return found, compiled(random_walk)(search_arrays(problem), layout, walk, found), sizes


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
