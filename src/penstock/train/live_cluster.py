"""Measure the hosts that a job was given, and report what is slower than its equals.

The ranks of all hosts take part, started by torchrun or srun; one process alone is a host of one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

import torch

from penstock.cluster.cluster import Cluster, Link
from penstock.device import is_gpu
from penstock.measure.clock import warm_up, work_s
from penstock.measure.links import MeasuredLink, cluster_alone, cluster_of
from penstock.measure.workers import usual_kind, with_speeds
from penstock.plan_here import measured_pairs
from penstock.runtime.processes.heartbeat import LIMIT_S
from penstock.runtime.processes.world import join_world
from penstock.text import rate_text

Pairs = Mapping[tuple[int, int], MeasuredLink]

SIDE, GPU_SIDE, REPEATS = 512, 8192, 15
"""Rows and columns of the matrices that each rank multiplies, on a CPU and on a GPU, and repeats;
a GPU's share of its peak rate grows with the matrices until they fill it."""

SLOW = 0.5
"""A link or a device with less than this share of what its equals have is slow."""


@dataclass(frozen=True)
class LiveCluster:
    """A cluster as measured, and what is slow in it, in words."""

    cluster: Cluster
    slow: tuple[str, ...]


def measure_cluster(device: str = "cpu", dtype: torch.dtype = torch.float32) -> LiveCluster:
    """Measure devices and links; every rank must call this, and all get the same result.

    A link that is slow among its equals is listed in the cluster as an exception. The ``speed`` of
    a device is that of products of matrices of type ``dtype``, relative to the usual device of the
    most common kind; of that kind it is 1 where it does not clearly differ.
    """
    world = join_world(device, LIMIT_S)
    try:
        if world.size == 1:
            return LiveCluster(cluster_alone(world.device), ())
        members, pairs = measured_pairs(world)
        world.barrier()
        seconds = world.all_gather(product_s(world.device, dtype))
    finally:
        world.leave()
    return slow_parts(cluster_of(members, dict(pairs)), pairs, seconds)


def product_s(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of a product of matrices on this rank, while all others do the same."""
    side = GPU_SIDE if is_gpu(device) else SIDE
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    warm_up(device)
    seconds_of = work_s(device, with_waits=True, ahead=True)
    return median(seconds_of(lambda: matrix @ matrix) for _ in range(REPEATS))


def slow_parts(cluster: Cluster, pairs: Pairs, seconds: Sequence[float]) -> LiveCluster:
    """The cluster with its slow links and devices, and each of these in words.

    ``seconds`` is how long each rank took for the same work. A device is slow among those of its
    kind. Links are compared with those between hosts, or inside of hosts, wherever they are.
    """
    slow: list[str] = []
    of_kind: dict[str, list[float]] = defaultdict(list)
    for device, own_s in zip(cluster.devices, seconds, strict=True):
        of_kind[device.kind].append(own_s)
    usual_s = {kind: median_low(found) for kind, found in of_kind.items()}
    speeds = [usual_s[usual_kind(cluster)] / own_s for own_s in seconds]
    for rank, device in enumerate(cluster.devices):
        speed = usual_s[device.kind] / seconds[rank]
        if speed < SLOW:
            slow.append(f"rank {rank} on {host_of(cluster, rank)} computes at {speed:.2f} of usual")
    kinds: dict[bool, list[tuple[int, int]]] = defaultdict(list)
    for a, b in pairs:
        kinds[cluster.host_index[a] != cluster.host_index[b]].append((a, b))
    links = dict(cluster.special_links)
    for across, found in kinds.items():
        usual = median(pairs[pair].bytes_per_s for pair in found)
        for a, b in found:
            link = pairs[a, b]
            if link.bytes_per_s < SLOW * usual:
                where = "between" if across else "inside"
                slow.append(
                    f"the link between rank {a} on {host_of(cluster, a)} and rank {b} on "
                    f"{host_of(cluster, b)} carries {rate_text(link.bytes_per_s)}, and links "
                    f"{where} hosts usually {rate_text(usual)}"
                )
                for ends in ((a, b), (b, a)):
                    links[ends] = Link(*ends, link.bytes_per_s, link.latency_s)
    found = replace(with_speeds(cluster, speeds), links=tuple(links.values()))
    return LiveCluster(found, tuple(slow))


def host_of(cluster: Cluster, rank: int) -> str:
    return f"'{cluster.hosts[cluster.host_index[rank]].name}'"
