"""The order of a ring: exact for few devices, never worse than host order, kept for later."""

from dataclasses import replace
from itertools import pairwise, permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.cluster.collectives import (
    all_reduce_costs,
    all_reduce_s,
    best_ring,
    host_order,
    ring_quality,
)

DEVICE = Device("d", 1e9)
RATES = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])
LATENCIES = st.sampled_from([0.0, 0.5, 1.0])


@st.composite
def linked_clusters(draw: st.DrawFn, most: int) -> Cluster:
    """Hosts with one or two devices, some half-duplex; links different in both directions."""
    counts = draw(st.lists(st.integers(1, 2), min_size=1, max_size=most // 2))
    hosts = tuple(
        replace(
            Host(
                f"h{i}", (DEVICE,) * n, draw(RATES), draw(RATES), draw(LATENCIES), draw(LATENCIES)
            ),
            half_duplex=draw(st.booleans()),
        )
        for i, n in enumerate(counts)
    )
    pairs = list(permutations(range(sum(counts)), 2))
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    links = tuple(Link(i, j, draw(RATES), draw(LATENCIES)) for i, j in chosen)
    return Cluster("linked", hosts, links)


def slowest_hop(cluster: Cluster, ring: tuple[int, ...]) -> tuple[float, float]:
    """Rate and minus latency of the worst hop, counted anew.

    A port is shared by its hops. All devices send while they receive, half-duplex ones at half the
    rate.
    """
    hops = [*pairwise(ring), (ring[-1], ring[0])]
    rates: list[float] = []

    def halved(rate: float, *hosts: int) -> float:
        return rate / 2 if any(cluster.hosts[host].half_duplex for host in hosts) else rate

    for source, target in hops:
        ends = cluster.host_index[source], cluster.host_index[target]
        rates.append(halved(cluster.bandwidth(source, target), *ends))
        if cluster.uses_port(source, target):
            for end, side in ((source, 0), (target, 1)):
                host = cluster.host_index[end]
                sharing = [
                    hop
                    for hop in hops
                    if cluster.uses_port(*hop) and cluster.host_index[hop[side]] == host
                ]
                rates.append(halved(cluster.hosts[host].port_bytes_per_s, host) / len(sharing))
    return min(rates), -max(cluster.latency(*hop) for hop in hops)


@settings(max_examples=150, deadline=None)
@given(linked_clusters(6))
def test_no_ring_of_few_devices_is_better_than_the_best(cluster: Cluster):
    devices = range(len(cluster.devices))
    if len(devices) < 2:
        return
    best = max(slowest_hop(cluster, (0, *rest)) for rest in permutations(devices[1:]))
    ring = best_ring(cluster, devices)
    assert sorted(ring) == list(devices)
    assert slowest_hop(cluster, tuple(ring)) == best
    quality = ring_quality(cluster, ring)
    assert (quality.bytes_per_s, quality.less_latency_s) == best


@settings(max_examples=50, deadline=None)
@given(linked_clusters(16), st.randoms())
def test_a_longer_ring_is_never_worse_than_host_order_and_the_same_every_time(
    cluster: Cluster, random: Random
):
    devices = list(range(len(cluster.devices)))
    if len(devices) < 2:
        return
    ring = best_ring(cluster, devices)
    assert sorted(ring) == devices
    in_order = slowest_hop(cluster, tuple(host_order(cluster, devices)))
    assert slowest_hop(cluster, tuple(ring))[0] >= in_order[0]
    random.shuffle(devices)
    assert best_ring(cluster, devices) == ring
    plain = Cluster(cluster.name, cluster.hosts, cluster.links)
    found = [all_reduce_costs(plain, devices), all_reduce_costs(cluster, sorted(devices))]
    one, other = ([(cost.latency_s, cost.s_per_byte) for cost in costs] for costs in found)
    assert one == other


def test_a_hidden_ring_of_fast_links_is_found_among_sixteen_devices():
    order = [(5 * i) % 16 for i in range(16)]
    fast = [Link(a, b, 100.0) for a, b in pairwise([*order, order[0]])]
    hosts = tuple(Host(f"h{i}", (DEVICE,), 0.0, 1.0) for i in range(16))
    cluster = Cluster("hidden", hosts, tuple(fast))
    assert ring_quality(cluster, best_ring(cluster, range(16))).bytes_per_s == 100.0
    assert all_reduce_s(cluster, range(16), 100.0) == pytest.approx(2 * 15 / 16)


def test_links_in_one_direction_are_used_in_that_direction():
    hosts = tuple(Host(f"h{i}", (DEVICE,), 0.0, 1.0) for i in range(3))
    links = (Link(0, 2, 10.0), Link(2, 1, 10.0), Link(1, 0, 10.0))
    cluster = Cluster("one way", hosts, links)
    assert best_ring(cluster, [0, 1, 2]) == [0, 2, 1]
    # Two of the three have the fast link one way only; the slow way back decides.
    assert all_reduce_s(cluster, [0, 1], 8.0) == pytest.approx(8.0)


def test_ways_depend_on_the_counts_of_hosts_only():
    host = Host("h", (DEVICE,) * 4, 100.0, 10.0, 0.25, 1.0)
    cluster = Cluster("pods", (host,) * 4)
    assert all_reduce_costs(cluster, [0, 1, 4, 5]) == all_reduce_costs(cluster, [14, 15, 9, 8])
    assert all_reduce_costs(cluster, [0, 1, 4]) != all_reduce_costs(cluster, [0, 1, 2])


def test_the_ways_of_512_devices_are_found_once(monkeypatch: pytest.MonkeyPatch):
    host = Host("h", (DEVICE,) * 8, 100.0, 10.0, 0.25, 1.0)
    cluster, devices = Cluster("pods", (host,) * 128), tuple(range(512))
    first = all_reduce_costs(cluster, devices)
    monkeypatch.delattr("penstock.cluster.collectives.host_order")
    assert all_reduce_costs(cluster, devices) == first
    # As many on each of as many hosts of the same kind: the same question.
    assert all_reduce_costs(cluster, tuple(range(512, 1024))) == first
