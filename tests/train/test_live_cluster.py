"""A live cluster: what is slow among its equals, and what has become worse than it was saved."""

from dataclasses import replace

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.measure.links import MeasuredLink, with_own_ports
from penstock.train.live_cluster import slow_parts

HOSTS = tuple(Host(name, (Device("cpu", 8e9),) * 2, 1e9, 1e8) for name in "abc")
SAVED = Cluster("saved", HOSTS)
USUAL = {(0, 1): 1e9, (2, 3): 1e9, (4, 5): 1e9, (0, 2): 1e8, (1, 3): 1e8, (0, 4): 1e8, (2, 4): 1e8}


def links(rates: dict[tuple[int, int], float]) -> dict[tuple[int, int], MeasuredLink]:
    return {pair: MeasuredLink(1e-4, rate) for pair, rate in rates.items()}


def test_nothing_is_slow_among_equals() -> None:
    found = slow_parts(SAVED, links(USUAL), [1.0, 1.1, 0.9, 1.0, 1.2, 1.0])
    assert found.slow == ()
    assert found.cluster == SAVED


def test_slow_links_and_devices_are_named_and_planned_with() -> None:
    found = slow_parts(SAVED, links({**USUAL, (0, 4): 2e7}), [1.0, 1.0, 1.0, 1.0, 1.0, 4.0])
    assert found.slow == (
        "rank 5 on 'c' computes at 0.25 of usual",
        "the link between rank 0 on 'a' and rank 4 on 'c' carries 20.0 MB/s, and links between "
        "hosts usually 100 MB/s",
    )
    assert found.cluster.devices[5].speed == 0.25
    assert found.cluster.bandwidth(0, 4) == found.cluster.bandwidth(4, 0) == 2e7
    assert found.cluster.bandwidth(0, 2) == 1e8


def test_a_device_is_slow_among_its_kind_and_its_speed_is_relative_to_the_usual_kind() -> None:
    kinds = (("H100", "H100"), ("H100", "T4"), ("T4", "H100"))
    hosts = tuple(
        replace(host, devices=tuple(Device(kind, 8e9) for kind in own))
        for host, own in zip(HOSTS, kinds, strict=True)
    )
    cluster = replace(SAVED, hosts=hosts)
    found = slow_parts(cluster, links(USUAL), [1.0, 1.1, 1.0, 8.0, 20.0, 1.0])
    assert found.slow == ("rank 4 on 'c' computes at 0.40 of usual",)
    assert [device.speed for device in found.cluster.devices] == [1, 1, 1, 0.125, 0.05, 1]


def test_devices_with_ports_of_their_own_keep_them_beside_a_slow_link() -> None:
    cluster = with_own_ports(SAVED)
    found = slow_parts(cluster, links({**USUAL, (0, 4): 2e7}), [1.0] * 6)
    assert len(found.slow) == 1
    assert len(found.cluster.links) == len(cluster.links) == 24
    assert found.cluster.bandwidth(0, 4) == 2e7
    assert found.cluster.bandwidth(1, 4) == 1e8
