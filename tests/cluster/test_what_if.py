from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import clusters

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.cluster.toml_file import find_cluster
from penstock.errors import BadInput
from penstock.planning.what_if import (
    DeviceChange,
    NumberChange,
    read_bandwidth_change,
    read_device_change,
    read_latency_change,
    with_device_change,
    with_link_bandwidth,
    with_link_latency,
)

TWO = Cluster(
    "two",
    (
        Host("a", (Device("d", 1e9),) * 2, 8e9, 2e9, 1e-6, 4e-6),
        Host("b", (Device("d", 1e9),), 0.0, 1e9, 0.0, 8e-6),
    ),
    (Link(0, 2, 5e9, 2e-6),),
)


def test_a_factor_changes_every_link_and_port_and_invents_none() -> None:
    twice = with_link_bandwidth(TWO, read_bandwidth_change("x2"))
    assert [h.link_bytes_per_s for h in twice.hosts] == [16e9, 0.0]
    assert [h.port_bytes_per_s for h in twice.hosts] == [4e9, 2e9]
    assert twice.links == (Link(0, 2, 10e9, 2e-6),)
    assert [h.link_latency_s for h in twice.hosts] == [1e-6, 0.0]


def test_an_absolute_rate_is_that_of_every_link_and_port() -> None:
    changed = with_link_bandwidth(TWO, read_bandwidth_change("80 Gb/s"))
    assert [h.link_bytes_per_s for h in changed.hosts] == [1e10, 0.0]
    assert [h.port_bytes_per_s for h in changed.hosts] == [1e10, 1e10]
    assert changed.bandwidth(0, 2) == changed.bandwidth(1, 2) == 1e10


def test_latencies_are_multiplied_or_set() -> None:
    half = with_link_latency(TWO, read_latency_change("x0.5"))
    assert (half.latency(0, 1), half.latency(1, 2), half.latency(0, 2)) == (5e-7, 4e-6, 1e-6)
    none = with_link_latency(TWO, read_latency_change("x0"))
    assert none.latency(0, 1) == none.latency(1, 2) == none.latency(0, 2) == 0.0
    assert with_link_latency(TWO, read_latency_change("5us")).latency(0, 2) == 5e-6


def test_one_device_becomes_slower_and_all_else_stays() -> None:
    cluster = find_cluster("dapple-a")
    slower = with_device_change(cluster, read_device_change("9 slower 25 %"))
    assert [d.speed for d in slower.devices] == [1.0] * 9 + [0.8] + [1.0] * 6
    assert slower.devices[9] == replace(cluster.devices[9], speed=0.8)
    assert [len(host.devices) for host in slower.hosts] == [8, 8]
    faster = with_device_change(slower, DeviceChange(9, "faster", 0.25))
    assert faster.devices[9].speed == pytest.approx(1.0)


@settings(max_examples=40, deadline=None)
@given(clusters(), st.floats(0.1, 10), st.data())
def test_changes_and_their_opposites_give_the_cluster_back(
    cluster: Cluster, factor: float, data: st.DataObject
) -> None:
    there, back = NumberChange(factor, True), NumberChange(1 / factor, True)
    same = with_link_bandwidth(with_link_bandwidth(cluster, there), back)
    same = with_link_latency(with_link_latency(same, there), back)
    device = data.draw(st.integers(0, len(cluster.devices) - 1))
    ways: tuple[Literal["slower"], Literal["faster"]] = ("slower", "faster")
    for way in ways:
        same = with_device_change(same, DeviceChange(device, way, factor))
    for old, new in zip(cluster.hosts, same.hosts, strict=True):
        assert new.link_bytes_per_s == pytest.approx(old.link_bytes_per_s)
        assert new.port_bytes_per_s == pytest.approx(old.port_bytes_per_s)
        assert new.port_latency_s == pytest.approx(old.port_latency_s)
    speeds = [[device.speed for device in each.devices] for each in (cluster, same)]
    assert speeds[1] == pytest.approx(speeds[0])


@pytest.mark.parametrize(
    "text", ["3 slower 20 %", "3:slower:20%", "3 slower 20%", " 3  slower 20 %"]
)
def test_a_device_change_is_read_in_either_form(text: str) -> None:
    assert read_device_change(text) == DeviceChange(3, "slower", 0.2)


@pytest.mark.parametrize(
    "text", ["2", "x", "fast", "x-2", "10 GB", "1 parsec", "x0", "0 GB/s", "x1.2.3"]
)
def test_a_rate_that_cannot_be_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_bandwidth_change(text)
    assert f"'{text}'" in str(caught.value)
    assert "x2, x0.5 or 10GB/s" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["3 slower", "slower 20 %", "3 lower 20 %", "-1 slower 2 %", "3", ""]
)
def test_a_device_change_that_cannot_be_read_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(BadInput, match="write the device's number, slower or faster"):
        read_device_change(text)


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadInput, match=r"'two' has no device 3; its devices are 0\.\.2"):
        with_device_change(TWO, DeviceChange(3, "slower", 0.1))
