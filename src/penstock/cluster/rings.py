"""Finds a fast order of devices in a ring: one whose slowest hop is fastest."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from penstock.cluster.cluster import Cluster

__all__ = ["best_ring", "duplex_share", "host_order", "ring_quality"]

EXACT_DEVICES = 6
"""With at most this many devices all orders (120) are tried."""

MOST_DEVICES = 64
"""With more devices the order of the hosts is kept."""

MOST_IMPROVEMENTS = 64


class RingQuality(NamedTuple):
    """The quality of an order; the larger of two is the better one.

    ``bytes_per_s`` is the rate of the slowest hop, ``fewer_slowest`` minus the number of hops with
    that rate, ``less_latency_s`` minus the longest latency of a hop.
    """

    bytes_per_s: float
    fewer_slowest: int
    less_latency_s: float


def host_order(cluster: Cluster, devices: Sequence[int]) -> list[int]:
    """The devices host after host, so that a ring enters and leaves each host once.

    This is optimal if there are no explicit links and links inside a host are no slower than its
    port.
    """
    host_index = cluster.host_index
    return sorted(devices, key=lambda device: (host_index[device], device))


def best_ring(cluster: Cluster, devices: Sequence[int]) -> list[int]:
    """The order of ``devices`` in which the slowest hop of a directed ring is fastest.

    Among those, one of low latency. This is the bottleneck travelling salesman problem. Up to
    `EXACT_DEVICES` all orders are compared. Beyond, three starts (host order, nearest neighbours,
    fastest links first) are improved by moves, swaps and reversals at the slowest hop until none
    helps. The result is deterministic, and its slowest hop is never slower than in host order.
    """
    start = host_order(cluster, devices)
    if len(start) > MOST_DEVICES:
        return start
    table = hop_table(cluster, start)
    first, *rest = range(len(start))
    if len(start) <= EXACT_DEVICES:
        found = [[first, *order] for order in permutations(rest)]
    else:
        starts = ([first, *rest], nearest_neighbours(table), fastest_links_first(table))
        found = [improve(table, ring) for ring in starts]
    best = max(found, key=lambda ring: without_count(quality_in(table, ring)))
    begin = best.index(first)
    return [start[position] for position in [*best[begin:], *best[:begin]]]


def ring_quality(cluster: Cluster, ring: Sequence[int]) -> RingQuality:
    """The quality of a directed ring; hops through one port share its rate.

    Every device of a ring sends while it receives, so on half-duplex hosts at half the rate.
    """
    hops = hops_of(ring)
    rates = [cluster.bandwidth(*hop) * duplex_share(cluster, hop) for hop in hops]
    through_ports = [hop for hop in hops if cluster.uses_port(*hop)]
    hosts = [(cluster.host_index[i], cluster.host_index[j]) for i, j in through_ports]
    shares = [0.5 if host.half_duplex else 1.0 for host in cluster.hosts]
    ports = zip(cluster.hosts, shares, strict=True)
    rates += shared_rates(hosts, [host.port_bytes_per_s * share for host, share in ports])
    slowest = min(rates)
    return RingQuality(slowest, -rates.count(slowest), -max(cluster.latency(*h) for h in hops))


def duplex_share(cluster: Cluster, hop: tuple[int, int]) -> float:
    """The fraction of a hop's rate that is left when both devices send and receive at once."""
    hosts = (cluster.hosts[cluster.host_index[device]] for device in hop)
    return 0.5 if any(host.half_duplex for host in hosts) else 1.0


def without_count(quality: RingQuality) -> tuple[float, float]:
    """What complete rings are compared by."""
    return quality.bytes_per_s, quality.less_latency_s


def hops_of(ring: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of each device and the next; the last is followed by the first."""
    return list(zip(ring, [*ring[1:], ring[0]], strict=True))


def shared_rates(hops: Sequence[tuple[int, int]], port_rates: Sequence[float]) -> list[float]:
    """Bytes per second that each hop between hosts gets from the busier of its two ports."""
    leaving = Counter(source for source, _ in hops)
    entering = Counter(target for _, target in hops)
    return [
        min(port_rates[source] / leaving[source], port_rates[target] / entering[target])
        for source, target in hops
    ]


@dataclass(frozen=True, slots=True)
class HopTable:
    """The rates of all hops between some devices, and the hosts whose ports they use."""

    rates: list[list[float]]
    latencies: list[list[float]]
    ports: dict[tuple[int, int], tuple[int, int]]
    port_rates: list[float]


def hop_table(cluster: Cluster, devices: Sequence[int]) -> HopTable:
    """The table for ``devices``, numbered from 0."""
    host_index, places = cluster.host_index, range(len(devices))
    return HopTable(
        rates=[[cluster.bandwidth(i, j) for j in devices] for i in devices],
        latencies=[[cluster.latency(i, j) for j in devices] for i in devices],
        ports={
            (a, b): (host_index[devices[a]], host_index[devices[b]])
            for a in places
            for b in places
            if cluster.uses_port(devices[a], devices[b])
        },
        port_rates=[host.port_bytes_per_s for host in cluster.hosts],
    )


def quality_in(table: HopTable, ring: Sequence[int]) -> RingQuality:
    """`ring_quality`, looked up in the table."""
    hops = hops_of(ring)
    rates = [table.rates[i][j] for i, j in hops]
    if table.ports:
        through_ports = [table.ports[hop] for hop in hops if hop in table.ports]
        rates += shared_rates(through_ports, table.port_rates)
    slowest = min(rates)
    longest_s = max([table.latencies[i][j] for i, j in hops])
    return RingQuality(slowest, -rates.count(slowest), -longest_s)


def nearest_neighbours(table: HopTable) -> list[int]:
    """A ring from each device to the one that it reaches fastest; the first wins ties."""
    ring, left = [0], list(range(1, len(table.rates)))
    while left:
        ahead = max(left, key=table.rates[ring[-1]].__getitem__)
        left.remove(ahead)
        ring.append(ahead)
    return ring


def fastest_links_first(table: HopTable) -> list[int]:
    """A ring made by joining ends of paths with the fastest remaining link, again and again."""
    links = [(i, j) for i, row in enumerate(table.rates) for j in range(len(row)) if i != j]
    links.sort(key=lambda link: -table.rates[link[0]][link[1]])
    path_of = {device: [device] for device in range(len(table.rates))}
    for source, target in links:
        first, second = path_of[source], path_of[target]
        if first is not second and first[-1] == source and second[0] == target:
            first += second
            path_of |= dict.fromkeys(second, first)
    return path_of[0]


def improve(table: HopTable, ring: list[int]) -> list[int]:
    """Change the ring at its slowest hop as long as that improves it."""
    quality = quality_in(table, ring)
    for _ in range(MOST_IMPROVEMENTS):
        slowest = slowest_hop(table, ring)
        better = (
            (found, other)
            for other in neighbours(ring, slowest)
            if (found := quality_in(table, other)) > quality
        )
        step = next(better, None)
        if step is None:
            return ring
        quality, ring = step
    return ring


def slowest_hop(table: HopTable, ring: list[int]) -> int:
    """The position in the ring at which the slowest hop begins."""
    hops = hops_of(ring)
    rates = [table.rates[i][j] for i, j in hops]
    positions = [place for place, hop in enumerate(hops) if hop in table.ports]
    shared = shared_rates([table.ports[hops[place]] for place in positions], table.port_rates)
    for place, rate in zip(positions, shared, strict=True):
        rates[place] = min(rates[place], rate)
    return rates.index(min(rates))


def neighbours(ring: list[int], hop: int) -> Iterator[list[int]]:
    """Rings without the hop that begins at position ``hop``: reversals, moves and swaps."""
    turned = [*ring[hop + 1 :], *ring[: hop + 1]]  # The hop now leads from the end to the start.
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
