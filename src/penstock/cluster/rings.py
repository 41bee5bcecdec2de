"""In which order a ring of devices is fastest: the ring whose slowest hop is fastest."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise, permutations
from typing import NamedTuple

from penstock.cluster.cluster import Cluster

__all__ = ["best_ring", "host_order", "ring_quality"]

EXACT_DEVICES = 6
"""Up to so many devices all orders are tried: 120 of them."""

MOST_DEVICES = 64
"""Beyond so many, the order of the hosts is kept."""

MOST_IMPROVEMENTS = 64


class RingQuality(NamedTuple):
    """How good an order is; the larger of two is the better one.

    ``bytes_per_s`` is the rate of the slowest hop, ``fewer_slowest`` minus the number of hops at
    that rate, ``less_latency_s`` minus the longest latency of a hop.
    """

    bytes_per_s: float
    fewer_slowest: int
    less_latency_s: float


def host_order(cluster: Cluster, devices: Sequence[int]) -> list[int]:
    """Host after host, so that a ring enters and leaves each host once.

    Optimal without explicit links, where links inside a host are no slower than its port.
    """
    host_index = cluster.host_index
    return sorted(devices, key=lambda device: (host_index[device], device))


def best_ring(cluster: Cluster, devices: Sequence[int]) -> list[int]:
    """The order of ``devices`` in which the slowest hop of a directed ring is fastest.

    Among those, one of low latency. This is the bottleneck travelling salesman: exact up to
    `EXACT_DEVICES`, by enumeration; beyond, host order, nearest neighbours and fastest links
    first are improved by moving, swapping and reversing at the slowest hop until nothing helps.
    Deterministic, and never worse than host order.
    """
    start = host_order(cluster, devices)
    if len(start) <= EXACT_DEVICES:
        rest = permutations(start[1:])
        return max(
            ([start[0], *order] for order in rest),
            key=lambda ring: without_count(ring_quality(cluster, ring)),
        )
    if len(start) > MOST_DEVICES:
        return start
    starts = (start, nearest_neighbours(cluster, start), fastest_links_first(cluster, start))
    improved = [improve(cluster, ring) for ring in starts]
    return max(improved, key=lambda ring: without_count(ring_quality(cluster, ring)))


def without_count(quality: RingQuality) -> tuple[float, float]:
    """What decides about a finished ring."""
    return quality.bytes_per_s, quality.less_latency_s


def ring_quality(cluster: Cluster, ring: Sequence[int]) -> RingQuality:
    """How good a directed ring is, with the hops through one port sharing its rate."""
    rates = hop_rates(cluster, ring)
    slowest = min(rates)
    latency_s = max(cluster.latency(*hop) for hop in hops_of(ring))
    return RingQuality(slowest, -rates.count(slowest), -latency_s)


def hops_of(ring: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each device with the next, the last with the first."""
    return pairwise(chain(ring, ring[:1]))


def hop_rates(cluster: Cluster, ring: Sequence[int]) -> list[float]:
    """Bytes per second of every hop when all carry data at once."""
    hops = list(hops_of(ring))
    host_index, hosts = cluster.host_index, cluster.hosts
    through_ports = [hop for hop in hops if cluster.uses_port(*hop)]
    leaving = Counter(host_index[source] for source, _ in through_ports)
    entering = Counter(host_index[target] for _, target in through_ports)
    rates: list[float] = []
    for source, target in hops:
        rate = cluster.bandwidth(source, target)
        if leaving and cluster.uses_port(source, target):
            out, into = host_index[source], host_index[target]
            rate = min(
                hosts[out].port_bytes_per_s / leaving[out],
                hosts[into].port_bytes_per_s / entering[into],
            )
        rates.append(rate)
    return rates


def nearest_neighbours(cluster: Cluster, devices: Sequence[int]) -> list[int]:
    """From each device on to the one it reaches fastest; ties keep the order of ``devices``."""
    ring, left = [devices[0]], list(devices[1:])
    while left:
        here = ring[-1]
        ahead = max(left, key=lambda device: cluster.bandwidth(here, device))
        left.remove(ahead)
        ring.append(ahead)
    return ring


def fastest_links_first(cluster: Cluster, devices: Sequence[int]) -> list[int]:
    """Join the ends of paths by the fastest links left until one path holds all devices."""
    links = [(i, j) for i in devices for j in devices if i != j]
    links.sort(key=lambda link: -cluster.bandwidth(*link))
    path_of = {device: [device] for device in devices}
    for source, target in links:
        first, second = path_of[source], path_of[target]
        if first is not second and first[-1] == source and second[0] == target:
            first += second
            path_of |= dict.fromkeys(second, first)
    return path_of[devices[0]]


def improve(cluster: Cluster, ring: list[int]) -> list[int]:
    """Change the ring at its slowest hop as long as that makes it better."""
    quality = ring_quality(cluster, ring)
    for _ in range(MOST_IMPROVEMENTS):
        rates = hop_rates(cluster, ring)
        slowest = rates.index(min(rates))
        better = (
            (found, other)
            for other in neighbours(ring, slowest)
            if (found := ring_quality(cluster, other)) > quality
        )
        step = next(islice(better, 1), None)
        if step is None:
            return ring
        quality, ring = step
    return ring


def neighbours(ring: list[int], hop: int) -> Iterator[list[int]]:
    """Rings without the hop from position ``hop`` to the next: reversals, moves and swaps."""
    turned = [*ring[hop + 1 :], *ring[: hop + 1]]  # the hop now leads from the end to the start
    size = len(turned)
    for end in range(2, size):
        yield [*reversed(turned[:end]), *turned[end:]]
    for position in (0, size - 1):
        rest = [*turned[:position], *turned[position + 1 :]]
        for place in range(1, size - 1):
            yield [*rest[:place], turned[position], *rest[place:]]
        for other in range(1, size - 1):
            swapped = list(turned)
            swapped[position], swapped[other] = swapped[other], swapped[position]
            yield swapped
