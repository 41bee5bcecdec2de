"""Seconds of all-reduce and of re-cut rows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.collectives import all_reduce_s
from penstock.costs.stage_costs import split_concat_s
from penstock.plan.row_split import row_overlaps

DEVICE = Device("d", 1e9)


def two_hosts(devices: int) -> Cluster:
    host = Host("h", (DEVICE,) * devices, 100.0, port_bytes_per_s=10.0, port_latency_s=1.0)
    return Cluster("two", (host, host))


def test_a_ring_moves_twice_the_bytes_but_one_share():
    cluster = Cluster("one", (Host("h", (DEVICE,) * 4, 100.0, link_latency_s=2.0),))
    assert all_reduce_s(cluster, range(4), 400.0) == pytest.approx(2 * 3 / 4 * 4 + 2 * 3 * 2)


def test_a_step_of_a_sum_may_take_longer_than_a_message():
    cluster = Cluster("one", (Host("h", (DEVICE,) * 4, 100.0, link_latency_s=2.0),), sum_step_s=3.0)
    assert all_reduce_s(cluster, range(4), 400.0) == pytest.approx(2 * 3 / 4 * 4 + 2 * 3 * 3)
    faster = replace(cluster, sum_step_s=1.0)
    assert all_reduce_s(faster, range(4), 400.0) == pytest.approx(2 * 3 / 4 * 4 + 2 * 3 * 2)


def test_hosts_sum_inside_and_between_in_steps_that_take_as_long():
    cluster = replace(two_hosts(4), sum_step_s=0.25)
    inside_s = 2 * (4 + 3 * 0.25)
    assert all_reduce_s(cluster, range(8), 400.0) == pytest.approx(inside_s + 40 + 2 * 1)


def test_one_device_and_no_bytes_take_no_time():
    assert all_reduce_s(two_hosts(2), [3], 400.0) == 0.0
    assert all_reduce_s(two_hosts(2), [0, 3], 0.0) == 0.0


def test_replicas_on_one_host_reduce_there_before_the_network():
    cluster = two_hosts(4)
    ring_s = 2 * 7 / 8 * 40 + 2 * 7 * 1
    hierarchical_s = 2 * 4 + (2 * 1 / 2 * 40 + 2 * 1)
    assert hierarchical_s < ring_s
    assert all_reduce_s(cluster, range(8), 400.0) == pytest.approx(hierarchical_s)


def test_the_busiest_sender_receiver_or_port_decides():
    cluster = two_hosts(2)
    # Inside a host: sender 0 sends all four rows, to itself and to device 1.
    assert split_concat_s(cluster, [0], [4], [0, 1], [2, 2], lambda n: 100.0 * n) == 2.0
    # Across: both messages share the port of the first host, 10 bytes a second and latency 1.
    assert split_concat_s(cluster, [0, 1], [1, 1], [2, 3], [1, 1], lambda n: 10.0 * n) == 4.0


SLICES = st.lists(st.integers(0, 2), max_size=5).map(lambda first: [*first, 10 - sum(first)])


@given(SLICES, SLICES)
def test_every_row_goes_from_who_has_it_to_who_needs_it(have: list[int], need: list[int]):
    has = [replica for replica, count in enumerate(have) for _ in range(count)]
    needs = [replica for replica, count in enumerate(need) for _ in range(count)]
    found = row_overlaps(have, need)
    assert [(o.sender, o.receiver) for o in found for _ in o.rows] == list(
        zip(has, needs, strict=True)
    )
    assert [row for o in found for row in o.rows] == list(range(10))
    assert len({(o.sender, o.receiver) for o in found}) == len(found)


def test_on_a_half_duplex_host_a_ring_takes_twice_as_long_and_a_pair_reduces_as_before():
    for latency_s in (0.0, 2.0):
        full = Host("h", (DEVICE,) * 4, 100.0, 10.0, latency_s, latency_s)
        half = replace(full, half_duplex=True)
        seconds = [all_reduce_s(Cluster("c", (host,)), range(4), 400.0) for host in (full, half)]
        latencies_s = 2 * 3 * latency_s
        assert seconds[1] - latencies_s == pytest.approx(2 * (seconds[0] - latencies_s))
        across = [
            all_reduce_s(Cluster("c", (host, replace(host, name="i"))), [0, 4], 400.0)
            for host in (full, half)
        ]
        assert across[1] - 2 * latency_s == pytest.approx(2 * (across[0] - 2 * latency_s))


def test_one_half_duplex_host_slows_the_ring_through_it():
    full = Host("h", (DEVICE,), 0.0, 10.0)
    mixed = Cluster("c", (full, replace(full, name="half", half_duplex=True), full))
    assert all_reduce_s(mixed, range(3), 30.0) == pytest.approx(2 * 2 / 3 * 30 / 5)
    assert all_reduce_s(mixed, [0, 2], 30.0) == pytest.approx(30 / 10)
