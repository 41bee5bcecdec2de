"""Random walks to plans that load devices and links evenly; and walks that the simulator judges."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

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
from penstock.plan.cost import depths_of, rows_by_speed
from penstock.plan.cost_tables import runs_in_core
from penstock.plan.plan import Plan, Stage, in_order, with_cut, with_recompute
from penstock.plan.problem import PlanningProblem, remembered
from penstock.plan.run_tables import Floats, Integers, run_tables
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.search.families import adapted_to
from penstock.search.judge import ITS_DEVICE, MAKING_A_PLAN, NEAR, Judge, actions_of


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
            Machine(device.speed, device.memory_bytes, host, device.chip)
            for device, host in zip(cluster.devices, cluster.host_index, strict=True)
        ],
        [
            HostRules(host.full_speed_devices, host.half_duplex, host.separate_links)
            for host in cluster.hosts
        ],
        Links(
            links.bytes_per_s,
            both_ways,
            links.latency_s,
            links.uses_port.astype(np.uint8),
            cluster.sum_step_s,
        ),
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


QUICK_DEPTH = 4
"""Micro-batches in flight, for each stage from here to the end, of a plan's first order."""

ACTIONS = 1_200_000
"""Simulated actions of the first orders of all plans; about a second."""

FASTEST = 6
"""How many plans are tried under more orders."""

DEPTHS = (1, 2, 3, 4, 6, 8)
"""Micro-batches in flight of their orders, for each stage from here to the end."""

HOT, COLD = 0.004, 1e-4
"""The shares by which slower plans are accepted at first, and at the end, of a simulated walk."""

MOST_LAYERS, MOST_OF_A_DEPTH = 2, 0.5
"""A cut moves by at most so many layers at once; a depth changes by at most such a share."""

DEEPER = 3
"""How many times as long walks over depths are. On BERT-32 with slow links depths were 0.9 % behind
those of a longer search after a walk of the length for cuts, and 0.5 % after this one."""

CUTS, RECOMPUTE, ANOTHER_MOVE = 0.3, 0.1, 0.5
"""Probabilities that a move where depths may change is one of a cut, or of recompute; and that
another move follows before the plan is simulated."""


def simulate_walked(judge: Judge, plans: Iterable[Plan], split: Sequence[str]) -> None:
    """Simulate the plans of walks, the fastest of them under every schedule and several depths.

    Each is simulated with early backwards, and under ``split``, schedules with one stage a device
    and split backwards.
    """
    seconds, actions = dict[Plan, float](), ACTIONS
    for plan in plans:
        if actions > 0:
            seconds[plan] = quick_s(judge, plan, split)
            actions -= sum(actions_of(replace(plan, schedule=name)) for name in split)
            actions -= actions_of(plan)
    fastest = sorted((plan for plan in seconds if seconds[plan] < inf), key=seconds.__getitem__)
    for plan in fastest[:FASTEST]:
        for variant in deeper_variants(judge.problem, plan):
            if judge.may_be_faster(variant, judge.whole[0]):
                judge.simulate(variant)


def quick_s(judge: Judge, plan: Plan, split: Sequence[str]) -> float:
    """The least seconds of a plan under a few orders; with and without recompute."""
    problem, least_s = judge.problem, inf
    for recompute in problem.recompute_choices:
        same = with_recompute(plan, recompute)
        early = at_depth(same, QUICK_DEPTH) if "early-backward" in problem.schedules else same
        for order in (early, *(adapted_to(problem, same, name) for name in split)):
            if judge.may_be_faster(order, NEAR * judge.best_s):
                least_s = min(least_s, judge.simulate(order))
    return least_s


def deeper_variants(problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """The plan under each schedule and several depths, with and without recompute."""
    found: list[Plan] = []
    for recompute in problem.recompute_choices:
        same = with_recompute(plan, recompute)
        found += [in_order(same, schedule) for schedule in problem.schedules]
        if "early-backward" in problem.schedules:
            found += dict.fromkeys(at_depth(same, depth) for depth in DEPTHS)
    return found


def at_depth(plan: Plan, depth: int) -> Plan:
    """The plan with early backwards and ``depth`` in flight for each stage from here to the end."""
    stages = len(plan.stages)
    limits = tuple(min(plan.micro_batches, depth * (stages - s)) for s in range(stages))
    return in_order(plan, "early-backward", limits)


def annealed(judge: Judge, start: Plan, generator: Generator, actions: float) -> Plan:
    """The fastest plan of a random walk over cuts and depths: simulated annealing.

    (Kirkpatrick et al., Science 1983.) A slower plan is accepted with probability
    ``exp(-slowdown / heat)``. The heat falls evenly while ``actions`` forwards and backwards are
    simulated. Depths and recompute move too where the schedule can be early-backward.
    """
    deep = FAMILIES[start.schedule].is_planned and "early-backward" in judge.allowed
    if deep:
        actions *= DEEPER
        # Climbs have toggled recompute here and there: one variant for all stages leads further.
        start = min(deeper_variants(judge.problem, start), key=judge.simulate)
        start = replace(start, schedule="early-backward", in_flight_limit=depths_of(start))
    current, current_s = start, judge.simulate(start)
    best, best_s, left = current, current_s, actions
    while left > 0:
        plan, another = current, True
        while another:
            plan = moved(judge.problem, plan, generator, deep=deep)
            another = generator.random() < ANOTHER_MOVE
        seconds = judge.simulate(plan)
        warmth = HOT * left / actions + COLD
        # The order of a plan whose costs are those of the last one is known.
        left -= MAKING_A_PLAN + (ITS_DEVICE + plan.micro_batches) * len(plan.devices)
        if seconds <= current_s * (1 + warmth * float(generator.standard_exponential())):
            current, current_s = plan, seconds
        if seconds < best_s:
            best, best_s = plan, seconds
    return best


def moved(problem: PlanningProblem, plan: Plan, generator: Generator, *, deep: bool) -> Plan:
    """The plan with another cut, for which it keeps its order; or, if ``deep``, another depth.

    Or with recompute of a stage switched on or off. Depths never grow along the pipeline: others
    change with one.
    """
    kind = float(generator.random()) if deep else 0.0
    if len(plan.stages) > 1 and kind < CUTS:
        s = int(generator.integers(1, len(plan.stages)))
        before, after = plan.stages[s - 1].layers, plan.stages[s].layers
        change = int(generator.integers(1, MOST_LAYERS + 1)) * sign_of(generator)
        start = min(max(after.start + change, before.start + 1), after.stop - 1)
        return with_cut(plan, s, start)
    s = int(generator.integers(len(plan.stages)))
    if kind > 1 - RECOMPUTE and problem.recompute == "auto":
        other = replace(plan.stages[s], recompute=not plan.stages[s].recompute)
        return replace(plan, stages=(*plan.stages[:s], other, *plan.stages[s + 1 :]))
    depths = plan.in_flight_limit
    furthest = 1 + depths[s] * MOST_OF_A_DEPTH * float(generator.random()) ** 2
    depth = depths[s] + int(furthest * generator.random() + 1) * sign_of(generator)
    depth = min(max(1, depth), plan.micro_batches)
    before_it = (max(other, depth) for other in depths[:s])
    after_it = (min(other, depth) for other in depths[s + 1 :])
    return in_order(plan, plan.schedule, (*before_it, depth, *after_it))


def sign_of(generator: Generator) -> int:
    """1 or -1."""
    return 1 if generator.random() < 0.5 else -1
