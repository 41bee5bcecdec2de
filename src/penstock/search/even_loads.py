"""Plans whose devices, engines and ports are loaded evenly."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from penstock.cluster.link_matrices import link_matrices
from penstock.core.native import (
    Found,
    HostRules,
    Layout,
    Links,
    LoadQuestion,
    Machine,
    SearchCosts,
    WalkPlan,
    random_walk,
)
from penstock.plan.cost import rows_by_speed
from penstock.plan.cost_tables import runs_in_core
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, remembered
from penstock.plan.run_tables import Floats, Integers, run_tables
from penstock.profile.model_profile import ModelProfile

__all__ = [
    "KINDS",
    "LoadKind",
    "evenly_loaded_plans",
    "layout_of",
    "load_question",
    "search_costs",
    "walked",
]


@remembered
def search_costs(problem: PlanningProblem) -> SearchCosts:
    """Profile and cluster of a problem for the core, with the links between all pairs of devices.

    A link is slower while both of its ends also send or receive the other way.
    """
    profile, cluster = problem.profile, problem.cluster
    edges, edge_bytes = edge_table(profile)
    links, layers = link_matrices(cluster), profile.layers
    sizes = (
        [layer.parameter_bytes for layer in layers],
        [layer.workspace_bytes.fixed for layer in layers],
        [layer.workspace_bytes.per_sample for layer in layers],
    )
    turns = np.array([cluster.hosts[host].half_duplex for host in cluster.host_index])
    both_ways = links.bytes_per_s / (1 + (turns[:, None] | turns[None, :]))
    return SearchCosts(
        runs_in_core(run_tables(problem)),
        np.array(sizes, dtype=np.float64),
        profile.step_s_per_byte,
        edges,
        edge_bytes,
        [
            Machine(device.speed, device.memory_bytes, host)
            for device, host in zip(cluster.devices, cluster.host_index, strict=True)
        ],
        [
            HostRules(host.full_speed_devices, host.half_duplex, host.separate_links)
            for host in cluster.hosts
        ],
        Links(links.bytes_per_s, both_ways, links.latency_s, links.uses_port.astype(np.uint8)),
    )


def edge_table(profile: ModelProfile) -> tuple[Integers, Floats]:
    """The edges, sorted by tensor and consumer: producer, consumer, number of the tensor.

    Then their bytes: the two parts of the activation's, and of its gradient's.
    """
    number: dict[str, int] = {}
    for edge in profile.edges:
        number.setdefault(edge.tensor, len(number))
    ordered = sorted(profile.edges, key=lambda edge: (number[edge.tensor], edge.consumer))
    edges = np.zeros((3, len(ordered)), dtype=np.int64)
    sizes = np.zeros((4, len(ordered)))
    for i, edge in enumerate(ordered):
        edges[:, i] = edge.producer, edge.consumer, number[edge.tensor]
        sizes[:2, i] = edge.bytes.fixed, edge.bytes.per_sample
        sizes[2:, i] = edge.gradient_bytes.fixed, edge.gradient_bytes.per_sample
    return edges, sizes


class LoadKind(NamedTuple):
    """A norm of all loads of a plan, or with ``power`` 0 the largest; see `plan_load.hpp`."""

    power: float
    steady: bool


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
    with ThreadPoolExecutor(len(KINDS)) as walks:
        rounds = [walks.submit(walked, problem, start, kind, steps, seed) for kind in KINDS]
    plans: list[tuple[int, Plan]] = []
    for found in rounds:
        best = sorted(found.result(), key=lambda one: one.seconds)[:KEPT]
        plans += [(place, plan_of(problem, one)) for place, one in enumerate(best)]
    plans.sort(key=lambda one: one[0])
    return list(dict.fromkeys(plan for _, plan in plans))


def walked(
    problem: PlanningProblem, start: Plan, kind: LoadKind, steps: int, seed: int
) -> list[Found]:
    """What a walk has found: one plan for each size of micro-batches and number of stages."""
    sizes = sorted(problem.micro_batch_sizes)
    walk = WalkPlan(
        sizes=sizes,
        first=sizes.index(start.micro_batch_size),
        asked=load_question(problem, kind),
        heat=HEAT,
        steps=steps,
        seed=seed,
    )
    return random_walk(search_costs(problem), layout_of(problem, start), walk)


def load_question(problem: PlanningProblem, kind: LoadKind) -> LoadQuestion:
    """What the loads of a problem's plans are asked for."""
    recompute = {"off": 0, "auto": 1, "on": 2}[problem.recompute]
    return LoadQuestion(problem.global_batch, recompute, kind.power, kind.steady)


def layout_of(problem: PlanningProblem, plan: Plan) -> Layout:
    """A plan as cuts; devices that it does not use come last."""
    devices, layers = len(problem.cluster.devices), len(problem.profile.layers)
    most = min(layers, devices, problem.max_stages or layers)
    order = list(dict.fromkeys((*plan.devices, *range(devices))))
    cuts, starts = [0], [0]
    for stage in plan.stages:
        cuts.append(stage.layers.stop)
        starts.append(starts[-1] + stage.replicas)
    rest = [layers] * (most - len(plan.stages))
    return Layout(order, cuts + rest, starts + rest, len(plan.stages))


def plan_of(problem: PlanningProblem, found: Found) -> Plan:
    """The plan of a layout, under the first schedule."""
    layout, size, made = found.layout, found.size, list[Stage]()
    cuts, starts, order = layout.cuts, layout.starts, layout.order
    for s in range(layout.stages):
        devices = tuple(order[starts[s] : starts[s + 1]])
        rows = rows_by_speed(problem.cluster, devices, size)
        made.append(Stage(range(cuts[s], cuts[s + 1]), devices, rows))
    return Plan(tuple(made), problem.global_batch // size, size, problem.schedules[0])
