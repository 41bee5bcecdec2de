"""PipeDream's planner: the slowest stage made as fast as can be, level by level of the cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.kernels import compiled
from penstock.plan.candidate import Candidate
from penstock.plan.cost import crossing_bytes, rows_by_speed
from penstock.plan.fitted_plan import fitted_plan
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.plan.run_tables import Floats, RunTables, run_tables
from penstock.planners.choice import best_candidate
from penstock.planners.coarse_chain import coarse_problem, expanded
from penstock.planners.pipedream_recurrence import Integers, partition
from penstock.profile.model_profile import Affine

__all__ = ["Level", "levels_of", "pipedream", "pipedream_candidates"]


MOST_LAYERS = 120
"""Longer chains are made coarser: the table grows with the third power of the layers."""


def pipedream(problem: PlanningProblem, score: Score) -> Plan:
    """The plan of PipeDream's dynamic program (SOSP 2019), trained synchronously.

    On every level of the cluster (devices of a host, then hosts), with ``A`` the seconds of the
    slowest stage of layers ``i..j`` on ``m`` workers, and a worker of the upper level a host:

        T(i, j, m) = (compute(i..j) + 4 (m - 1) P(i..j) / (BW m)) / m
        A(i, j, m) = min of T(i, j, m) and, over k and m', of
                     max{ A(i, k, m - m'),  T(k, j, m'),  2 a_k / (BW m'),  2 a_j / (BW m') }

    ``compute`` is forward and backward of a micro-batch on one worker, on the upper level the
    ``A`` of a whole host (whose devices share the all-reduce between hosts); the factor 4 is that
    of weights sent to and from a parameter server for every micro-batch; ``a`` are bytes of
    activations at a cut, with their gradients ``2 a``. Stages must fit with ``ceil(workers from
    here to the end / m')`` micro-batches in flight; a worker may stay idle. Micro-batches of every
    size are tried, each plan run by 1F1B with a flush at the end of the batch (the first schedule
    allowed where 1F1B is not); ``score`` chooses among the sizes.

    Departures: a micro-batch is split over replicas instead of dealt to them in turn; weights are
    not stashed, so they count once; workers are taken to be as slow and as small as the slowest
    and the smallest device, links of a level as slow as the slowest. Where hosts differ in their
    number of devices there is one level, of all devices. Chains of more than `MOST_LAYERS` layers
    are cut at likely places only.

    Raises:
        Infeasible: nothing fits; the message says what would.
    """
    coarse, cuts = coarse_problem(problem, MOST_LAYERS)
    candidates = expanded(pipedream_candidates(coarse), cuts)
    return best_candidate(problem, candidates, score, planner="pipedream")


def pipedream_candidates(problem: PlanningProblem) -> Iterator[Candidate]:
    """The plan of every micro-batch size."""
    schedule = "1f1b" if "1f1b" in problem.schedules else problem.schedules[0]
    levels, tables = levels_of(problem.cluster), run_tables(problem)
    profile = problem.profile
    moves = [
        crossing_bytes(profile, cut, lambda edge: edge.bytes)
        + crossing_bytes(profile, cut, lambda edge: edge.gradient_bytes)
        for cut in range(len(profile.layers) + 1)
    ]
    for size in problem.micro_batch_sizes:
        solved: list[Solved] = []
        for number, level in enumerate(levels):
            inner = solved[-1] if solved else None
            whole = number == len(levels) - 1
            solved.append(solve(problem, tables, moves, level, inner, size, only_first=whole))
        seconds = solved[-1].value[0, -1]
        if seconds[-1] < inf:
            assignments = [
                (run, devices, rows_by_speed(problem.cluster, devices, size))
                for run, devices in stages_of(solved, len(seconds) - 1, levels)
            ]
            plan = fitted_plan(problem, assignments, schedule)
            if plan is not None:
                yield Candidate(plan, float(seconds[-1]))


ONE_STAGE, ONE_LESS = -1, -2
"""Choices of the recurrence that are no cut."""


@dataclass(frozen=True, slots=True)
class Level:
    """Equal workers: ``members[i]`` are the devices of worker ``i``; the rate between workers."""

    members: tuple[tuple[int, ...], ...]
    bytes_per_s: float


def levels_of(cluster: Cluster) -> tuple[Level, ...]:
    """The levels of a cluster, lowest first; the lowest is that of one host's devices.

    >>> from penstock.cluster.presets import find_cluster
    >>> [len(level.members) for level in levels_of(find_cluster("dapple-a"))]
    [8, 2]
    >>> [len(level.members) for level in levels_of(find_cluster("dapple-b"))]
    [16]
    """
    hosts: list[tuple[int, ...]] = []
    start = 0
    for host in cluster.hosts:
        hosts.append(tuple(range(start, start + len(host.devices))))
        start += len(host.devices)
    inside = [host.link_bytes_per_s for host in cluster.hosts if len(host.devices) > 1]
    # Hosts that only explicit links join have no port.
    ports = [host.port_bytes_per_s for host in cluster.hosts if host.port_bytes_per_s > 0]
    across = ports if len(hosts) > 1 else []
    special = [link.bytes_per_s for link in cluster.links]
    everyone = tuple((device,) for device in range(start))
    if len(hosts) == 1 or not inside or not across or len({len(host) for host in hosts}) > 1:
        return (Level(everyone, min([*inside, *across, *special, inf])),)
    one_host = tuple((device,) for device in hosts[0])
    return (Level(one_host, min(*inside, *special, inf)), Level(tuple(hosts), min(across)))


@dataclass(frozen=True, slots=True)
class Solved:
    """The table of one level: least seconds by ``[lo, hi, workers]``, and how they are reached."""

    value: Floats
    choice: Integers

    def stages(self, lo: int, hi: int, workers: int) -> list[tuple[int, int, int]]:
        """First layer, end and workers of each stage, in order."""
        found: list[tuple[int, int, int]] = []
        while (chosen := int(self.choice[lo, hi, workers])) != ONE_STAGE:
            if chosen == ONE_LESS:
                workers -= 1
                continue
            cut, last = divmod(chosen, self.value.shape[2])
            found.append((cut, hi, last))
            hi, workers = cut, workers - last
        return [(lo, hi, workers), *found[::-1]]


def solve(
    problem: PlanningProblem,
    tables: RunTables,
    moves: Sequence[Affine],
    level: Level,
    inner: Solved | None,
    size: int,
    *,
    only_first: bool,
) -> Solved:
    """The table of a level for micro-batches of ``size`` samples; ``inner`` is the level below.

    ``moves`` are the bytes of both directions at every cut.
    """
    cuts, workers = len(problem.profile.layers) + 1, len(level.members)
    each = len(level.members[0])
    slowest = min(device.speed for device in problem.cluster.devices)
    least_s = (tables.forward_s.at(size) + tables.backward_s.at(size)) / slowest / each
    compute_s, needed = least_s, needed_bytes(problem, tables, size)
    if inner is not None:
        compute_s, needed = np.ascontiguousarray(inner.value[:, :, -1]), np.zeros_like(needed)
    count = np.arange(workers + 1)
    reduce_each = 4 * (count - 1) / (level.bytes_per_s * np.maximum(count, 1)) / each
    reduce_each[count * each > max(size, each)] = inf
    reduce_each[0] = inf
    shape = (1 if only_first else cuts, cuts, workers + 1)
    value, choice = np.full(shape, inf), np.full(shape, -1, dtype=np.int64)
    compiled(partition)(
        value,
        choice,
        compute_s,
        least_s,
        tables.parameter_bytes,
        reduce_each,
        np.array([moved.at(size) for moved in moves]) / level.bytes_per_s,
        needed,
        min(device.memory_bytes for device in problem.cluster.devices),
        problem.global_batch // size,
        shape[0] if only_first else cuts - 1,
    )
    return Solved(value, choice)


def needed_bytes(problem: PlanningProblem, tables: RunTables, size: int) -> Floats:
    """What a stage holds: always, for the first micro-batch in flight, for each further one."""
    saved, inputs = tables.saved_bytes.at(size), tables.input_bytes.at(size)
    again = saved if problem.recompute == "off" else np.minimum(saved, inputs)
    return np.stack([tables.held_bytes, saved, again])


def stages_of(
    solved: Sequence[Solved], workers: int, levels: Sequence[Level]
) -> list[tuple[range, tuple[int, ...]]]:
    """The layers and devices of all stages on at most ``workers`` workers of the top level."""
    top, members = solved[-1], levels[-1].members
    stages: list[tuple[range, tuple[int, ...]]] = []
    start = 0
    for lo, hi, count in top.stages(0, top.value.shape[1] - 1, workers):
        hosts = members[start : start + count]
        start += count
        if len(levels) == 1:
            stages.append((range(lo, hi), tuple(device for host in hosts for device in host)))
            continue
        # Replicated hosts: each runs the whole inner pipeline, so its stages have replicas in all.
        inner = solved[0].stages(lo, hi, len(hosts[0]))
        ends = accumulate((share for _, _, share in inner), initial=0)
        for (inner_lo, inner_hi, _), (a, b) in zip(inner, pairwise(ends), strict=True):
            devices = tuple(device for host in hosts for device in host[a:b])
            stages.append((range(inner_lo, inner_hi), devices))
    return stages
