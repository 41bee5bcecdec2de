"""The best rates of a cluster's links that any placement of a plan can use."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import AllReduceCost
from penstock.cluster.link_matrices import link_matrices
from penstock.plan.run_tables import Floats

__all__ = ["LinkLimits", "link_limits"]


@dataclass(frozen=True)
class LinkLimits:
    """Rates that no set of devices exceeds, in bytes per second.

    ``receive_rates[r]`` bounds what ``r`` devices receive together, each at its best link;
    ``send_rates`` what they send. ``ring_rates[r]`` bounds the slowest link of a ring all-reduce
    over ``r`` devices. ``inside_rate`` and ``across_rate`` are the best rates of a link inside a
    host, and between hosts.
    """

    cluster: Cluster
    latency_s: float
    receive_rates: tuple[float, ...]
    send_rates: tuple[float, ...]
    ring_rates: tuple[float, ...]
    inside_rate: float
    across_rate: float
    across_latency_s: float

    @property
    def best_rate(self) -> float:
        """The most bytes per second that any one device receives or sends."""
        return max(self.receive_rates[1], self.send_rates[1])

    @cached_property
    def hosts_by_size(self) -> tuple[int, ...]:
        """Devices of each host, largest first."""
        return tuple(sorted((len(host.devices) for host in self.cluster.hosts), reverse=True))

    def fewest_hosts(self, replicas: int) -> int:
        """The fewest hosts that hold so many devices."""
        held = 0
        for count, devices in enumerate(self.hosts_by_size, start=1):
            held += devices
            if held >= replicas:
                return count
        return len(self.hosts_by_size)

    def two_levels(self, replicas: int) -> tuple[AllReduceCost, ...]:
        """The least cost of an all-reduce in two levels, on at least two hosts."""
        hosts = max(2, self.fewest_hosts(replicas))
        if hosts >= replicas:
            return ()
        leaders = ring(hosts, self.across_latency_s, min(self.across_rate, self.ring_rates[hosts]))
        inside_s_per_byte = 1 / self.inside_rate if self.inside_rate > 0 else inf
        return (
            AllReduceCost(
                2 * self.latency_s + leaders.latency_s, 2 * inside_s_per_byte + leaders.s_per_byte
            ),
        )

    def least_all_reduce_costs(self, replicas: int) -> tuple[AllReduceCost, ...]:
        """The least cost of an all-reduce of ``replicas`` devices by each algorithm.

        The algorithms are those of `all_reduce_costs`.
        """
        if replicas < 2:
            return ()
        flat = ring(replicas, self.latency_s, self.ring_rates[replicas])
        if max(self.hosts_by_size) == 1 or len(self.hosts_by_size) == 1:
            return (flat,)
        return (flat, *self.two_levels(replicas))


def ring(replicas: int, latency_s: float, rate: float) -> AllReduceCost:
    """A ring all-reduce whose slowest link has ``rate``."""
    steps = 2 * (replicas - 1)
    return AllReduceCost(steps * latency_s, steps / replicas / rate if rate > 0 else inf)


def link_limits(cluster: Cluster) -> LinkLimits:
    """The limits of ``cluster``."""
    rates, latencies = links_to_others(cluster)
    count = len(cluster.devices)
    if count == 1:
        return LinkLimits(cluster, 0.0, (0.0, inf), (0.0, inf), (inf, inf), inf, inf, 0.0)
    hosts = np.array(cluster.host_index)
    elsewhere = hosts[:, None] != hosts[None, :]
    beside = ~elsewhere & ~np.eye(count, dtype=bool)
    # All links of a device together are at most so many times as fast as its best one.
    at_once = most_links_at_once(cluster)
    return LinkLimits(
        cluster,
        latency_s=float(latencies.min()) / at_once,
        receive_rates=best_sums(at_once * rates.max(axis=0)),
        send_rates=best_sums(at_once * rates.max(axis=1)),
        ring_rates=best_rings(rates),
        inside_rate=float(rates[beside].max()) if beside.any() else 0.0,
        across_rate=float(rates[elsewhere].max()) if elsewhere.any() else 0.0,
        across_latency_s=float(latencies[elsewhere].min()) if elsewhere.any() else inf,
    )


def most_links_at_once(cluster: Cluster) -> int:
    """The most messages that a device may receive, or send, at once.

    On a host with separate links there may be one on each, and one on the device's own engine.
    """
    return max((len(h.devices) for h in cluster.hosts if h.separate_links), default=1)


def links_to_others(cluster: Cluster) -> tuple[Floats, Floats]:
    """Bytes per second (0 to itself) and latency (infinite to itself) of every pair of devices."""
    links = link_matrices(cluster)
    np.fill_diagonal(links.bytes_per_s, 0.0)
    np.fill_diagonal(links.latency_s, inf)
    return links.bytes_per_s, links.latency_s


def best_sums(rates: Floats) -> tuple[float, ...]:
    """Entry ``r``: the sum of the ``r`` largest."""
    return (0.0, *np.cumsum(np.sort(rates)[::-1]).tolist())


def best_rings(rates: Floats) -> tuple[float, ...]:
    """Entry ``r``: a rate that the slowest link of no ring over ``r`` devices exceeds.

    A ring connects its devices. So ``r`` devices must be in one connected component of the links
    that are at least as fast; a link counts in its faster direction.
    """
    count = len(rates)
    values = np.unique(rates[~np.eye(count, dtype=bool)])
    if len(values) == 1:
        return (inf, inf, *[float(values[0])] * (count - 1))
    return component_rates(rates)


def component_rates(rates: Floats) -> tuple[float, ...]:
    """`best_rings` by connected components, from a maximum spanning tree (Prim)."""
    count = len(rates)
    either = np.maximum(rates, rates.T)
    joined = np.zeros(count, dtype=bool)
    reach, source = either[0].copy(), np.zeros(count, dtype=np.int64)
    joined[0] = True
    edges: list[tuple[float, int, int]] = []
    for _ in range(count - 1):
        new = int(np.where(joined, -1.0, reach).argmax())
        edges.append((float(reach[new]), int(source[new]), new))
        joined[new] = True
        source = np.where(either[new] > reach, new, source)
        reach = np.maximum(reach, either[new])
    return largest_components(count, sorted(edges, reverse=True))


def largest_components(count: int, edges: Sequence[tuple[float, int, int]]) -> tuple[float, ...]:
    """Entry ``r``: the largest rate at which the edges at least as fast connect ``r`` devices."""
    component = list(range(count))
    members = {device: [device] for device in range(count)}
    best = [inf, inf] + [0.0] * (count - 1)
    largest = 1
    for rate, one, other in edges:
        keep, gone = component[one], component[other]
        for device in members[gone]:
            component[device] = keep
        members[keep] += members.pop(gone)
        for size in range(largest + 1, len(members[keep]) + 1):
            best[size] = rate
        largest = max(largest, len(members[keep]))
    return tuple(best)
