"""What the compiled search of `penstock.planners.dapple.kernel` reads, as flat arrays."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import Way
from penstock.plan.cost import crossing_bytes
from penstock.plan.problem import PlanningProblem
from penstock.plan.run_tables import AffineTable, Floats, RunTables, workspace_table
from penstock.planners.dapple.groups import Groups
from penstock.profile.model_profile import Affine

__all__ = [
    "GroupArrays",
    "Integers",
    "LayerArrays",
    "LinkArrays",
    "StepArrays",
    "group_arrays",
    "layer_arrays",
    "link_arrays",
    "step_arrays",
]

Integers = NDArray[np.int64]


class LayerArrays(NamedTuple):
    """Costs of layers: sums up to each cut, tables ``[lo, hi]`` of runs, bytes at each cut."""

    forward_fixed: Floats
    forward_each: Floats
    backward_fixed: Floats
    backward_each: Floats
    saved_fixed: Floats
    saved_each: Floats
    input_fixed: Floats
    input_each: Floats
    parameter_bytes: Floats
    held_bytes: Floats
    cut_bytes: Floats
    least_each: Floats


class LinkArrays(NamedTuple):
    """Seconds a byte and latencies: inside hosts, through ports, and special ones (row, column)."""

    host: Integers
    link_each: Floats
    link_latency: Floats
    port_each: Floats
    port_latency: Floats
    special_each: Floats
    special_latency: Floats


class GroupArrays(NamedTuple):
    """Groups of devices that hold a stage: kinds of replicas, and ways to all-reduce.

    Kind ``i`` of a group is a number of rows on a speed and a memory; ``workspace[w]`` is the
    table of the largest workspace of each run for the rows of kinds with that index.
    """

    start: Integers
    rows: Floats
    speed: Floats
    memory: Floats
    workspace_index: Integers
    workspace: Floats
    way_latency: Floats
    way_each: Floats
    ways: Integers
    crowd: Floats
    step_each: Floats


class StepArrays(NamedTuple):
    """Steps of `Occupancies` from each source, and the last stage on all devices left.

    ``sender`` and ``receiver`` are the devices of a step as its target and its source number the
    servers, from ``start`` on, with their ``slices``; ``rest_*`` likewise for each occupancy. A
    group of -1 has more devices than a micro-batch has rows. ``idle`` is all devices left over
    those of the last stage.
    """

    out: Integers
    target: Integers
    group: Integers
    start: Integers
    sender: Integers
    receiver: Integers
    slices: Integers
    rest_group: Integers
    rest_start: Integers
    rest_device: Integers
    rest_slices: Integers
    speed_left: Floats
    idle: Floats


def layer_arrays(problem: PlanningProblem, tables: RunTables) -> LayerArrays:
    """The costs of a problem's layers."""
    profile = problem.profile
    cuts = [crossing_bytes(profile, c, lambda e: e.bytes) for c in range(len(profile.layers) + 1)]
    back = [
        crossing_bytes(profile, c, lambda e: e.gradient_bytes)
        for c in range(len(profile.layers) + 1)
    ]
    most = max(problem.micro_batch_sizes)
    work = [layer.forward_s + layer.backward_s for layer in profile.layers]
    # Any slice of a stage costs at least this much for each of its rows.
    least = [max(0.0, min(cost.at(1), cost.at(most) / most)) for cost in work]
    return LayerArrays(
        *prefixes(tables.forward_s),
        *prefixes(tables.backward_s),
        *prefixes(tables.saved_bytes),
        tables.input_bytes.fixed,
        tables.input_bytes.per_sample,
        tables.parameter_bytes,
        tables.held_bytes,
        np.array(
            [[s.fixed for s in sizes] for sizes in (cuts, back)]
            + [[s.per_sample for s in sizes] for sizes in (cuts, back)]
        ),
        np.array(list(accumulate(least, initial=0.0))),
    )


def prefixes(table: AffineTable) -> tuple[Floats, Floats]:
    """The sums up to each cut of the two terms of a cost."""
    return table.fixed[0].copy(), table.per_sample[0].copy()


def link_arrays(cluster: Cluster) -> LinkArrays:
    """Every figure that `Cluster.bandwidth` and `Cluster.latency` decide by."""
    size = len(cluster.devices) if cluster.links else 0
    each, latency = np.full((size, size), -1.0), np.zeros((size, size))
    for link in cluster.links:
        each[link.source, link.target] = 1 / link.bytes_per_s
        latency[link.source, link.target] = link.latency_s
    hosts = cluster.hosts
    return LinkArrays(
        host=np.array(cluster.host_index, dtype=np.int64),
        link_each=np.array([1 / (h.link_bytes_per_s or np.inf) for h in hosts]),
        link_latency=np.array([h.link_latency_s for h in hosts]),
        port_each=np.array([1 / (h.port_bytes_per_s or np.inf) for h in hosts]),
        port_latency=np.array([h.port_latency_s for h in hosts]),
        special_each=each,
        special_latency=latency,
    )


def group_arrays(problem: PlanningProblem, groups: Groups, micro_batch_size: int) -> GroupArrays:
    """The kinds of replicas of every group for micro-batches of that size."""
    loads = [
        loads_of(problem, group, groups.slices(group, micro_batch_size))
        if len(group) <= micro_batch_size
        else []
        for group in groups.devices
    ]
    kinds = [kind for of_group in loads for kind in of_group]
    rows = sorted({kind[0] for kind in kinds})
    tables = workspaces(problem, rows)
    index = {count: number % len(tables) for number, count in enumerate(rows)}
    speeds = [device.speed for device in problem.cluster.devices]
    return GroupArrays(
        start=np.cumsum([0, *(len(of_group) for of_group in loads)]),
        rows=np.array([float(kind[0]) for kind in kinds]),
        speed=np.array([kind[1] for kind in kinds]),
        memory=np.array([kind[2] for kind in kinds]),
        workspace_index=np.array([index[kind[0]] for kind in kinds], dtype=np.int64),
        workspace=np.stack(tables),
        way_latency=np.array([[way.latency_s for way in padded(ways)] for ways in groups.ways]),
        way_each=np.array([[way.s_per_byte for way in padded(ways)] for ways in groups.ways]),
        ways=np.array([len(ways) for ways in groups.ways]),
        crowd=np.array(groups.crowds),
        step_each=problem.profile.step_s_per_byte
        / np.array([min(speeds[d] for d in group) for group in groups.devices]),
    )


def loads_of(
    problem: PlanningProblem, group: tuple[int, ...], slices: tuple[int, ...]
) -> list[tuple[int, float, float]]:
    """Rows, speed and memory of the replicas that may be slowest or fullest."""
    devices = problem.cluster.devices
    kinds = {
        (rows, devices[d].speed, devices[d].memory_bytes)
        for d, rows in zip(group, slices, strict=True)
    }
    return sorted(kind for kind in kinds if not any(outweighs(other, kind) for other in kinds))


def outweighs(other: tuple[int, float, float], kind: tuple[int, float, float]) -> bool:
    """Whether a replica has no fewer rows on no faster and no larger a device, and differs."""
    return other != kind and other[0] >= kind[0] and other[1] <= kind[1] and other[2] <= kind[2]


def workspaces(problem: PlanningProblem, rows: Sequence[int]) -> list[Floats]:
    """The workspace of runs of layers for each number of rows; one table where there is none."""
    profile = problem.profile
    if any(layer.workspace_bytes != Affine() for layer in profile.layers) and rows:
        return [workspace_table(profile, count) for count in rows]
    return [np.zeros((len(profile.layers) + 1, len(profile.layers) + 1))]


def padded(ways: tuple[Way, ...]) -> tuple[Way, ...]:
    """Ways of all-reduce, filled up to two."""
    return (*ways, Way(0.0, 0.0), Way(0.0, 0.0))[:2]


def step_arrays(groups: Groups, micro_batch_size: int) -> StepArrays:
    """The steps of the search for micro-batches of that size."""
    speeds = [device.speed for device in groups.cluster.devices]
    places = groups.places
    rests = [groups.rest(number, micro_batch_size) for number in range(len(places.used))]
    left = [sum(speeds[d] for d in groups.free(n)) for n in range(len(places.used))]
    sizes = [len(devices) for devices in groups.receivers]
    fits = [
        n if size <= micro_batch_size else -1 for n, size in zip(groups.numbers, sizes, strict=True)
    ]
    sources = [step.source for step in places.steps]
    return StepArrays(
        out=np.searchsorted(sources, np.arange(len(places.used) + 1)),
        target=np.array([step.target for step in places.steps], dtype=np.int64),
        group=np.array(fits, dtype=np.int64),
        start=np.cumsum([0, *sizes]),
        sender=flat(groups.senders),
        receiver=flat(groups.receivers),
        slices=flat([groups.slices(d, micro_batch_size) for d in groups.receivers]),
        rest_group=np.array([groups.number(rest) for rest in rests], dtype=np.int64),
        rest_start=np.cumsum([0, *(len(rest) for rest in rests)]),
        rest_device=flat(rests),
        rest_slices=flat([groups.slices(rest, micro_batch_size) for rest in rests]),
        speed_left=np.array(left),
        idle=np.array([len(groups.free(n)) / len(rest) for n, rest in enumerate(rests)]),
    )


def flat(parts: Sequence[tuple[int, ...]]) -> Integers:
    """Tuples one after the other."""
    return np.array([n for part in parts for n in part], dtype=np.int64)
