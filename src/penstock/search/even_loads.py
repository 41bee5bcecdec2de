"""Plans whose devices, engines and ports are loaded evenly."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.link_matrices import link_matrices
from penstock.kernels import compiled, copy_into
from penstock.plan.cost import rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, remembered
from penstock.plan.run_tables import Floats, Integers, run_tables
from penstock.profile.model_profile import ModelProfile
from penstock.search.plan_load import Layout, LoadKind, load_s

__all__ = ["evenly_loaded_plans", "layout_of", "random_walk", "search_arrays"]


class SearchArrays(NamedTuple):
    """Profile and cluster of a problem.

    ``forward``, ``backward``, ``saved``, ``parameters``, ``held``, ``inputs`` and ``norms`` are the
    tables of `penstock.plan.run_tables.RunTables`. The rows of ``workspace`` are the fixed part of
    each layer and the part for each sample. The rows of ``edges`` are producer, consumer and a
    number of the tensor, sorted by tensor and consumer; those of ``edge_bytes`` are the two parts
    of its activation and of its gradient. ``host_slots`` are the devices of a host that compute at
    full speed at once, 0 for all. ``half_duplex`` is 1 for hosts whose messages of both directions
    take turns. ``duplex_bandwidth`` is the rate of a link while both of its ends also send or
    receive the other way.
    """

    forward: Floats
    backward: Floats
    saved: Floats
    parameters: Floats
    held: Floats
    inputs: Floats
    norms: Floats
    layer_parameters: Floats
    workspace: Floats
    edges: Integers
    edge_bytes: Floats
    speed: Floats
    memory: Floats
    host: Integers
    host_slots: Integers
    half_duplex: Integers
    bandwidth: Floats
    duplex_bandwidth: Floats
    latency: Floats
    port: NDArray[np.uint8]
    step_s_per_byte: float


@remembered
def search_arrays(problem: PlanningProblem) -> SearchArrays:
    """The arrays of a problem, with the links between all pairs of devices."""
    profile, cluster = problem.profile, problem.cluster
    edges, edge_bytes = edge_table(profile)
    tables, links = run_tables(problem), link_matrices(cluster)
    workspaces = [layer.workspace_bytes for layer in profile.layers]
    half_duplex = np.array([host.half_duplex for host in cluster.hosts], dtype=np.int64)
    turns = half_duplex[np.array(cluster.host_index)]
    return SearchArrays(
        forward=tables.forward,
        backward=tables.backward,
        saved=tables.saved,
        parameters=tables.parameters,
        held=tables.held,
        inputs=tables.inputs,
        norms=tables.norms,
        layer_parameters=np.array([float(layer.parameter_bytes) for layer in profile.layers]),
        workspace=np.array([[w.fixed for w in workspaces], [w.per_sample for w in workspaces]]),
        edges=edges,
        edge_bytes=edge_bytes,
        speed=np.array([device.speed for device in cluster.devices]),
        memory=np.array([device.memory_bytes for device in cluster.devices]),
        host=np.array(cluster.host_index, dtype=np.int64),
        host_slots=np.array([host.full_speed_devices for host in cluster.hosts], dtype=np.int64),
        half_duplex=half_duplex,
        bandwidth=links.bytes_per_s,
        duplex_bandwidth=links.bytes_per_s / (1 + (turns[:, None] | turns[None, :])),
        latency=links.latency_s,
        port=links.uses_port.astype(np.uint8),
        step_s_per_byte=profile.step_s_per_byte,
    )


def edge_table(profile: ModelProfile) -> tuple[Integers, Floats]:
    """``edges`` and ``edge_bytes`` of `SearchArrays`."""
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


COLD = 1e-4
"""The share by which slower plans are accepted at the end."""

ANOTHER_MOVE = 0.3
"""Probability that a move is followed by another one before the plan is compared."""


def move_cut(layout):
    """Move one cut by some layers, by few more often than by many."""
    cuts, stages = layout.cuts, layout.stages[0]
    if stages > 1:
        place = 1 + np.random.randint(stages - 1)
        step = int(2 ** (np.random.random() * 3.6))
        cut = cuts[place] + (step if np.random.random() < 0.5 else -step)
        if cuts[place - 1] < cut < cuts[place + 1]:
            cuts[place] = cut


def swap_devices(order):
    """Swap two devices, wherever they are."""
    i, j = np.random.randint(len(order)), np.random.randint(len(order))
    order[i], order[j] = order[j], order[i]


def swap_stages(layout):
    """Exchange the devices of two neighbouring stages, perhaps with their numbers of layers."""
    order, cuts, starts, stages = layout.order, layout.cuts, layout.starts, layout.stages[0]
    if stages < 2:
        return
    place = 1 + np.random.randint(stages - 1)
    first, middle, last = starts[place - 1], starts[place], starts[place + 1]
    for k in range(middle, last):
        shift_device(order, k, first + k - middle)
    starts[place] = first + last - middle
    if np.random.random() < 0.5:
        cuts[place] = cuts[place - 1] + cuts[place + 1] - cuts[place]


def move_device(layout):
    """Move one device to another stage, to none, or from none."""
    order, starts, stages = layout.order, layout.starts, layout.stages[0]
    place = np.random.randint(len(order))
    giver = stages
    for s in range(stages):
        if starts[s] <= place < starts[s + 1]:
            giver = s
    taker = np.random.randint(stages + 1)
    if giver == taker or (giver < stages and starts[giver + 1] - starts[giver] < 2):
        return
    if giver < taker:
        shift_device(order, place, starts[taker + 1] - 1 if taker < stages else len(order) - 1)
        for s in range(giver + 1, min(taker, stages) + 1):
            starts[s] -= 1
    else:
        shift_device(order, place, starts[taker + 1])
        for s in range(taker + 1, min(giver, stages) + 1):
            starts[s] += 1


def shift_device(order, place, target):
    """Move the device at one place to another; shift those between."""
    device, step = order[place], 1 if place < target else -1
    for k in range(place, target, step):
        order[k] = order[k + step]
    order[target] = device


def join(layout):
    """Join two neighbouring stages."""
    stages = layout.stages[0]
    if stages > 1:
        for s in range(1 + np.random.randint(stages - 1), stages):
            layout.cuts[s], layout.starts[s] = layout.cuts[s + 1], layout.starts[s + 1]
        layout.stages[0] -= 1


def split(layout):
    """Split a stage in two, between its devices or with a further device."""
    order, cuts, starts, stages = layout.order, layout.cuts, layout.starts, layout.stages[0]
    place = np.random.randint(stages)
    lo, hi = cuts[place], cuts[place + 1]
    if hi - lo < 2 or stages + 1 == len(cuts):
        return
    width, taken = starts[place + 1] - starts[place], 0
    if starts[stages] < len(order) and (width < 2 or np.random.random() < 0.5):
        shift_device(order, starts[stages], starts[place + 1])
        taken, given = 1, width
    elif width > 1:
        given = 1 + np.random.randint(width - 1)
    else:
        return
    for s in range(stages, place, -1):
        cuts[s + 1], starts[s + 1] = cuts[s], starts[s] + taken
    cuts[place + 1] = lo + 1 + np.random.randint(hi - lo - 1)
    starts[place + 1] = starts[place] + given
    layout.stages[0] += 1


def move(layout, size, sizes):
    """Make one random move, or several; return the index of the micro-batch size after it."""
    while True:
        drawn = np.random.random()
        if drawn < 0.35:
            move_cut(layout)
        elif drawn < 0.5:
            swap_devices(layout.order)
        elif drawn < 0.6:
            swap_stages(layout)
        elif drawn < 0.7:
            move_device(layout)
        elif drawn < 0.8:
            join(layout)
        elif drawn < 0.95:
            split(layout)
        else:
            size += 1 if np.random.random() < 0.5 else -1
            size = min(max(size, 0), sizes - 1)
        if np.random.random() >= ANOTHER_MOVE:
            return size


class Walk(NamedTuple):
    """The inputs of a random walk of ``steps`` plans.

    ``sizes`` are those of micro-batches, and ``first`` is the index of the start's. ``batch``,
    ``recompute`` and ``kind`` are as in `load_s`. At first, plans that are slower by about the
    share ``heat`` are accepted.
    """

    sizes: Integers
    first: int
    batch: int
    recompute: int
    kind: LoadKind
    heat: float
    steps: int
    seed: int


def copy_layout(target, source):
    """Copy one layout into another of the same size."""
    copy_into(target.order, source.order)
    copy_into(target.cuts, source.cuts)
    copy_into(target.starts, source.starts)
    target.stages[0] = source.stages[0]


def copy_of(layout):
    """A copy of a layout."""
    return Layout(
        layout.order.copy(), layout.cuts.copy(), layout.starts.copy(), layout.stages.copy()
    )


def keep(found, found_s, place, layout, seconds):
    """Keep a layout at its place, if it has the least load of those that belong there."""
    if seconds < found_s[place]:
        found_s[place] = seconds
        copy_into(found.order[place], layout.order)
        copy_into(found.cuts[place], layout.cuts)
        copy_into(found.starts[place], layout.starts)
        found.stages[place, 0] = layout.stages[0]


def random_walk(a: SearchArrays, start: Layout, walk: Walk, found: Layout) -> Floats:
    """The best plans on a random walk by simulated annealing (Kirkpatrick et al., Science 1983).

    Returns the least `load_s` for each micro-batch size and number of stages. Its layout is written
    into the arrays of ``found``, as a row of each.
    """
    np.random.seed(walk.seed)
    count, most = len(walk.sizes), len(start.cuts) - 1
    found_s = np.full(count * most, np.inf)
    now, new, size = copy_of(start), copy_of(start), walk.first
    now_s = load_s(a, now, walk.sizes[size], walk.batch, walk.recompute, walk.kind)
    keep(found, found_s, size * most + now.stages[0] - 1, now, now_s)
    for step in range(walk.steps):
        copy_layout(new, now)
        new_size = move(new, size, count)
        seconds = load_s(a, new, walk.sizes[new_size], walk.batch, walk.recompute, walk.kind)
        warmth = walk.heat * (1 - step / walk.steps) + COLD
        limit_s = now_s * (1 - warmth * np.log(1 - np.random.random()))
        if not seconds < np.inf or seconds > limit_s:
            continue
        copy_layout(now, new)
        size, now_s = new_size, seconds
        keep(found, found_s, size * most + now.stages[0] - 1, now, now_s)
    return found_s
