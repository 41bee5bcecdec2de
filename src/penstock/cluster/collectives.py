"""Seconds of collective communication: gradient all-reduce, and what else occupies links."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import NamedTuple, TypeAlias, cast

from penstock.cluster.cluster import Cluster
from penstock.core.native import AllReduceCost

Hop: TypeAlias = tuple[int, int]
"""A device that sends, and one that receives."""

BUCKET_BYTES = 25 << 20
"""Gradients are all-reduced in buckets of about this size, as in DistributedDataParallel. Runtime,
simulator, planners and bounds all use this value."""

STATISTIC_BYTES = 4
"""Bytes of a number in the tables that batch normalisation sums over replicas."""

MOST_ANSWERS = 1 << 16
"""Number of entries at which a cluster's cache is cleared."""


def all_reduce_s(cluster: Cluster, devices: Sequence[int], size_bytes: float) -> float:
    """Seconds to sum ``size_bytes`` over ``devices`` and give each the sum.

    The faster of two algorithms:

        ring           2 (r-1)/r * bytes / slowest hop    + 2 (r-1) * latency
        hierarchical   reduce inside every host, ring over one device of each, broadcast inside

    The ring visits the hosts one after the other, so it uses every port once in each direction. One
    device, or no bytes, takes no time.

    Source: the ring is that of DAPPLE's planner (PPoPP 2021); the hierarchy is that of two-level
    collectives in Horovod and NCCL.
    """
    if size_bytes <= 0:
        return 0.0
    costs = all_reduce_costs(cluster, devices)
    return min((cost.of(size_bytes) for cost in costs), default=0.0)


def all_reduce_costs(cluster: Cluster, devices: Sequence[int]) -> tuple[AllReduceCost, ...]:
    """The algorithms of `all_reduce_s`; none for a single device. The result is cached.

    Without explicit links among the devices, only the number of devices on each kind of host
    matters. With them, the ring is the best one of `penstock.cluster.collectives`.
    """
    if len(devices) < 2:
        return ()
    linked = len(members := cluster.linked_devices.intersection(devices)) > 1 and any(
        (i, j) in cluster.special_links for i in members for j in members
    )
    if linked:
        key: tuple[object, ...] = ("costs", frozenset(devices))
    else:
        counts = Counter(map(cluster.host_index.__getitem__, devices))
        kinds = frozenset((cluster.host_kinds[host], count) for host, count in counts.items())
        key = ("costs", len(devices), len(counts), kinds)
    known = cast("dict[object, tuple[AllReduceCost, ...]]", cluster.known_answers)
    if key not in known:
        if len(known) >= MOST_ANSWERS:
            known.clear()
        ring = host_order(cluster, devices)
        costs = costs_in_order(cluster, ring)
        known[key] = (ring_cost(cluster, best_ring(cluster, ring)), *costs) if linked else costs
    return known[key]


def costs_in_order(cluster: Cluster, ring: list[int]) -> tuple[AllReduceCost, ...]:
    """The ring through devices in the order of their hosts, and the hierarchical algorithm."""
    by_host: dict[int, list[int]] = defaultdict(list)
    for device in ring:
        by_host[cluster.host_index[device]].append(device)
    groups = list(by_host.values())
    flat = ring_cost(cluster, ring)
    if len(groups) in (1, len(ring)):
        return (flat,)
    inside = [chain_cost(cluster, group) for group in groups]
    leaders = [group[0] for group in groups]
    if cluster.links:
        leaders = best_ring(cluster, leaders)
    across = ring_cost(cluster, leaders)
    hierarchical = AllReduceCost(
        latency_s=2 * max(cost.latency_s for cost in inside) + across.latency_s,
        s_per_byte=2 * max(cost.s_per_byte for cost in inside) + across.s_per_byte,
    )
    return (flat, hierarchical)


def ring_cost(cluster: Cluster, ring: Sequence[int]) -> AllReduceCost:
    """A ring all-reduce in the given order; hops through one port share its rate."""
    quality = ring_quality(cluster, ring)
    steps = len(ring) - 1
    return AllReduceCost(
        latency_s=2 * steps * -quality.less_latency_s,
        s_per_byte=2 * steps / len(ring) / quality.bytes_per_s,
    )


def chain_cost(cluster: Cluster, group: Sequence[int]) -> AllReduceCost:
    """A reduction to (or broadcast from) one device of a group, pipelined along a chain.

    Devices inside the chain send and receive at the same time.
    """
    links = list(pairwise(group))
    if not links:
        return AllReduceCost(0.0, 0.0)
    shares = [duplex_share(cluster, link) if len(links) > 1 else 1.0 for link in links]
    rates = [cluster.bandwidth(*link) * share for link, share in zip(links, shares, strict=True)]
    return AllReduceCost(
        latency_s=sum(step_latency(cluster, *link) for link in links), s_per_byte=1 / min(rates)
    )


def message_resources(cluster: Cluster, source: int, target: int) -> tuple[tuple[str, int], ...]:
    """The resources of a message: both devices' engines, and perhaps the ports of their hosts."""
    engines = (("send", source), ("receive", target))
    if not cluster.uses_port(source, target):
        return engines
    hosts = cluster.host_index
    return (*engines, ("port out", hosts[source]), ("port in", hosts[target]))


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
    table = hop_table(cluster, permutations(start, 2))
    first, *rest = start
    if len(start) <= EXACT_DEVICES:
        found = [[first, *order] for order in permutations(rest)]
    else:
        starts = (start, nearest_neighbours(table, start), fastest_links_first(table, start))
        found = [improve(table, ring) for ring in starts]
    # Complete rings are not compared by the number of their slowest hops.
    best = max(found, key=lambda ring: quality_in(table, ring)[::2])
    begin = best.index(first)
    return [*best[begin:], *best[:begin]]


def ring_quality(cluster: Cluster, ring: Sequence[int]) -> RingQuality:
    """The quality of a directed ring; hops through one port share its rate."""
    return quality_in(hop_table(cluster, hops_of(ring)), ring)


def duplex_share(cluster: Cluster, hop: Hop) -> float:
    """The fraction of a hop's rate that is left when both devices send and receive at once."""
    turning = cluster.half_duplex_devices
    return 0.5 if hop[0] in turning or hop[1] in turning else 1.0


def step_latency(cluster: Cluster, source: int, target: int) -> float:
    """Seconds of a step of an all-reduce without any bytes."""
    return max(cluster.latency(source, target), cluster.sum_step_s)


def hops_of(ring: Sequence[int]) -> list[Hop]:
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
    """Rates and latencies of hops from device to device, and the hosts whose ports they use.

    ``port_rates`` are the bytes per second of each host's port, each way, while both are in use.
    """

    rates: dict[Hop, float]
    latencies: dict[Hop, float]
    ports: dict[Hop, tuple[int, int]]
    port_rates: list[float]


def hop_table(cluster: Cluster, hops: Iterable[Hop]) -> HopTable:
    """The table of these hops."""
    hops, host_index = list(hops), cluster.host_index
    return HopTable(
        rates={hop: cluster.bandwidth(*hop) * duplex_share(cluster, hop) for hop in hops},
        latencies={hop: step_latency(cluster, *hop) for hop in hops},
        ports={(i, j): (host_index[i], host_index[j]) for i, j in hops if cluster.uses_port(i, j)},
        port_rates=[h.port_bytes_per_s * (0.5 if h.half_duplex else 1.0) for h in cluster.hosts],
    )


def quality_in(table: HopTable, ring: Sequence[int]) -> RingQuality:
    """`ring_quality`, looked up in a table of its hops."""
    hops = hops_of(ring)
    through_ports = [table.ports[hop] for hop in hops if hop in table.ports]
    rates = [table.rates[hop] for hop in hops]
    rates += shared_rates(through_ports, table.port_rates)
    slowest = min(rates)
    return RingQuality(slowest, -rates.count(slowest), -max([table.latencies[hop] for hop in hops]))


def nearest_neighbours(table: HopTable, devices: Sequence[int]) -> list[int]:
    """A ring from each device to the one that it reaches fastest; the first wins ties."""
    ring, left = [devices[0]], list(devices[1:])
    while left:
        ahead = max(left, key=lambda device: table.rates[ring[-1], device])
        left.remove(ahead)
        ring.append(ahead)
    return ring


def fastest_links_first(table: HopTable, devices: Sequence[int]) -> list[int]:
    """A ring made by joining ends of paths with the fastest remaining link, again and again."""
    path_of = {device: [device] for device in devices}
    for source, target in sorted(table.rates, key=lambda hop: -table.rates[hop]):
        first, second = path_of[source], path_of[target]
        if first is not second and first[-1] == source and second[0] == target:
            first += second
            path_of |= dict.fromkeys(second, first)
    return path_of[devices[0]]


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
    rates = [table.rates[hop] for hop in hops]
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
