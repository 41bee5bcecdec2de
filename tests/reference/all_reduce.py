"""Seconds of an all-reduce, step by step; shares no code with the package's formulas.

Only for clusters without explicit links: there the devices of a host stand next to one another.
"""

from collections import Counter, defaultdict
from itertools import pairwise

from penstock.cluster.cluster import Cluster


def all_reduced_s(cluster: Cluster, devices: tuple[int, ...], size_bytes: float) -> float:
    """The quicker of one ring, and of sums inside each host with a ring of one device of each."""
    if len(devices) < 2 or not size_bytes:
        return 0.0
    hosts: dict[int, list[int]] = defaultdict(list)
    for device in sorted(devices):
        hosts[cluster.host_index[device]].append(device)
    one_ring_s = ring_s(cluster, [d for held in hosts.values() for d in held], size_bytes)
    if len(hosts) in (1, len(devices)):
        return one_ring_s
    latencies = [sum(cluster.latency(*pair) for pair in pairwise(d)) for d in hosts.values()]
    sums_s = max(slowest_link_s(cluster, held, size_bytes) for held in hosts.values())
    leaders_s = ring_s(cluster, [held[0] for held in hosts.values()], size_bytes)
    # Up to the first device of each host, and back.
    return min(one_ring_s, 2 * max(latencies) + 2 * sums_s + leaders_s)


def ring_s(cluster: Cluster, ring: list[int], size_bytes: float) -> float:
    """Each device passes a piece on in every step: until sums are whole, and until all have them.

    In a step a port is occupied by every piece that passes through it, and a half-duplex link or
    port by those in both directions.
    """
    steps, piece = 2 * (len(ring) - 1), size_bytes / len(ring)
    longest_s = latest_s = 0.0
    leaving: Counter[int] = Counter()
    entering: Counter[int] = Counter()
    for source, target in pairwise([*ring, ring[0]]):
        turns = 2 if any(both_ways(cluster, device) for device in (source, target)) else 1
        longest_s = max(longest_s, turns * piece / cluster.bandwidth(source, target))
        latest_s = max(latest_s, cluster.latency(source, target))
        if cluster.uses_port(source, target):
            leaving[cluster.host_index[source]] += 1
            entering[cluster.host_index[target]] += 1
    for i, host in enumerate(cluster.hosts):
        passing = max(leaving[i], entering[i]) * (2 if host.half_duplex else 1)
        if passing:
            longest_s = max(longest_s, passing * piece / host.port_bytes_per_s)
    return steps * (longest_s + latest_s)


def slowest_link_s(cluster: Cluster, held: list[int], size_bytes: float) -> float:
    """All bytes over the slowest link of a chain; those in its midst send while they receive."""
    half = len(held) > 2 and both_ways(cluster, held[0])
    rates = [cluster.bandwidth(*pair) for pair in pairwise(held)]
    return (2 if half else 1) * size_bytes / min(rates) if rates else 0.0


def both_ways(cluster: Cluster, device: int) -> bool:
    """Whether what a device sends waits for what it receives."""
    return cluster.hosts[cluster.host_index[device]].half_duplex
