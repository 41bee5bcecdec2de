"""Links of a live process group are measured, and every rank learns the same."""

from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path

import pytest
import torch
from measure.known_channel import KnownChannel

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.machine import usable_cores, usable_memory_bytes
from penstock.measure.links import (
    SIZES_BYTES,
    MeasuredLink,
    Member,
    cluster_of,
    measure_links,
    measured_link,
)
from penstock.runtime.processes.launch import launch_workers

GPU_NUMBERS = count()
PAIRS_OF_FOUR = [(i, j) for i in range(4) for j in range(i + 1, 4)]


def member(host: str, kind: str = "cpu") -> Member:
    if kind == "cpu":
        return Member(host, kind, 8e9, 2)
    return Member(host, kind, 8e9, 0, identity=f"GPU-{next(GPU_NUMBERS)}")


def test_a_live_group_measures_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from link_workers import measured

    clusters = launch_workers(measured, workers=2)
    assert clusters[0] == clusters[1]
    (host,) = clusters[0].hosts
    assert len(host.devices) == 2
    assert 1e7 < host.link_bytes_per_s < 1e12
    assert 0 <= host.link_latency_s < 0.05
    assert 0 < clusters[0].sum_step_s < 0.5
    assert sum(d.memory_bytes for d in host.devices) == usable_memory_bytes()
    assert host.full_speed_devices == (1 if usable_cores() == 1 else 0)


def rounds_of(waits_s: list[list[float]]) -> list[list[float]]:
    """Seconds over a link of 0.1 ms and 4 GB/s, where each message waits for a core first."""
    return [
        [1e-4 + size / 4e9 + wait for size, wait in zip(SIZES_BYTES, waits, strict=True)]
        for waits in waits_s
    ]


def test_latency_and_bandwidth_fit_the_medians() -> None:
    one_slow_round = [[0.0] * 5, [0.0] * 5, [1e-2, 0.0, 3e-3, 0.0, 1e-3]]
    found = measured_link(rounds_of(one_slow_round))
    assert found.latency_s == pytest.approx(1e-4)
    assert found.bytes_per_s == pytest.approx(4e9)


def test_where_most_small_messages_wait_the_least_seconds_count() -> None:
    mostly_slow = [[0.0] * 5, [4e-3, 4e-3, 4e-3, 4e-3, 0.0], [6e-3, 4e-3, 5e-3, 4e-3, 0.0]]
    found = measured_link(rounds_of(mostly_slow))
    assert found.latency_s == pytest.approx(1e-4)
    assert found.bytes_per_s == pytest.approx(4e9)


def test_a_bandwidth_that_waiting_hides_is_the_largest_messages_own() -> None:
    always_slow = [[4e-3, 4e-3, 3e-3, 2e-3, 1e-3]] * 3
    found = measured_link(rounds_of(always_slow))
    largest_s = 1e-4 + 4_194_304 / 4e9 + 1e-3
    assert found == MeasuredLink(largest_s, 4_194_304 / largest_s)


def test_hosts_get_the_medians_of_their_pairs_and_ports_those_between_hosts() -> None:
    inside, between = MeasuredLink(1e-5, 8e9), MeasuredLink(1e-4, 1e9)
    members = [member("a", "V100"), member("a", "V100"), member("b", "V100"), member("b", "V100")]
    figures = {(i, j): between for i in (0, 1) for j in (2, 3)}
    cluster = cluster_of(members, figures | {(0, 1): inside, (2, 3): inside})
    assert (cluster.bandwidth(0, 1), cluster.latency(0, 1)) == (8e9, 1e-5)
    assert (cluster.bandwidth(1, 2), cluster.latency(1, 2)) == (1e9, 1e-4)
    assert all(device.memory_bytes == 8e9 for device in cluster.devices)


def test_processes_that_share_a_processor_share_its_memory_and_cores() -> None:
    figures = {(i, j): MeasuredLink(1e-5, 1e9) for i in range(4) for j in range(i + 1, 4)}
    with_quota = replace(member("a"), cores=1)
    (host,) = cluster_of([with_quota, *[member("a")] * 3], figures).hosts
    assert host.full_speed_devices == 2
    assert [device.memory_bytes for device in host.devices] == [2e9] * 4


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    own, shared = member("a", "T4"), member("a", "T4")
    figures = {pair: MeasuredLink(1e-5, 1e9, both_ways=2.0) for pair in ((0, 1), (0, 2), (1, 2))}
    (host,) = cluster_of([own, shared, shared], figures).hosts
    assert [device.memory_bytes for device in host.devices] == [8e9, 4e9, 4e9]
    assert not host.half_duplex
    (apart,) = cluster_of([replace(own, identity=name) for name in "abc"], figures).hosts
    assert apart.half_duplex


def test_between_hosts_messages_cost_the_processor_and_may_take_turns() -> None:
    inside, port = MeasuredLink(1e-5, 1e9, 1e-4, 2e9), MeasuredLink(1e-4, 3e8, 3e-4, 5e8, 2.5)
    figures = {(i, j): inside if (i, j) in ((0, 1), (2, 3)) else port for i, j in PAIRS_OF_FOUR}
    for host in cluster_of([member("a"), member("a"), member("b"), member("b")], figures).hosts:
        assert host.half_duplex
        assert {(d.message_s, d.message_bytes_per_s) for d in host.devices} == {(3e-4, 5e8)}
    # On one host messages go through memory. A GPU does not copy them itself.
    (alone,) = cluster_of([member("a")] * 2, {(0, 1): inside}).hosts
    assert (alone.half_duplex, alone.devices[0].message_bytes_per_s) == (False, 0)
    gpus = cluster_of([member("a", "H100"), member("b", "H100")], {(0, 1): MeasuredLink(0, 1e9)})
    assert gpus.devices[0].message_s == 0


@pytest.mark.parametrize("half_duplex", [False, True])
def test_a_known_channel_is_measured_as_it_is(
    monkeypatch: pytest.MonkeyPatch, half_duplex: bool
) -> None:
    """The channel says what one message takes in one direction; nothing else may come out."""
    channel = KnownChannel(40e-6, 1.25e8, 25e-6, 4e9, half_duplex)
    monkeypatch.setattr("penstock.measure.links.distributed", channel)
    for module in ("links", "clock"):
        monkeypatch.setattr(f"penstock.measure.{module}.time", channel)
    for host in measure_links().hosts:
        (device,) = host.devices
        assert host.port_latency_s == pytest.approx(40e-6, rel=1e-6)
        assert host.port_bytes_per_s == pytest.approx(1.25e8, rel=1e-6)
        assert device.message_s == pytest.approx(25e-6, rel=1e-6)
        assert device.message_bytes_per_s == pytest.approx(4e9, rel=1e-6)
        assert host.half_duplex == half_duplex


def test_an_end_that_works_as_long_for_any_message_has_no_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Powers of two add up without rounding; a rate of 0 stands for no time a byte."""
    channel = KnownChannel(2.0**-14, 2.0**27, 2.0**-15, inf)
    monkeypatch.setattr("penstock.measure.links.distributed", channel)
    for module in ("links", "clock"):
        monkeypatch.setattr(f"penstock.measure.{module}.time", channel)
    device = measure_links().devices[0]
    assert (device.message_s, device.message_bytes_per_s) == (2.0**-15, 0.0)


class SlowStart(KnownChannel):
    """A channel that carries the first MiB of a message at a third of its rate."""

    def one_way_s(self, message: torch.Tensor) -> float:
        seconds = super().one_way_s(message)
        return seconds + 2 * min(message.numel(), 1 << 20) / self.bytes_per_s


def measured_between_gpus(monkeypatch: pytest.MonkeyPatch, channel: KnownChannel) -> Cluster:
    monkeypatch.setattr("penstock.measure.links.distributed", channel)
    channel.backend = "nccl"
    monkeypatch.setattr("penstock.measure.links.is_gpu", lambda device: True)
    monkeypatch.setattr("penstock.measure.links.device_kind", lambda device: "H100")
    monkeypatch.setattr("penstock.measure.links.identity_of", lambda device: "GPU-0")
    monkeypatch.setattr("penstock.measure.links.usable_bytes", lambda device: 8e10)
    for module in ("links", "clock"):
        monkeypatch.setattr(f"penstock.measure.{module}.time", channel)
    return measure_links()


@pytest.mark.parametrize("half_duplex", [False, True])
def test_a_link_of_gpus_is_what_large_messages_see(
    monkeypatch: pytest.MonkeyPatch, half_duplex: bool
) -> None:
    channel = SlowStart(10e-6, 4e11, 0.0, 1e12, half_duplex)
    cluster = measured_between_gpus(monkeypatch, channel)
    (host, _), (device, _) = cluster.hosts, cluster.devices
    for size in (16 << 20, 256 << 20):
        seconds = channel.one_way_s(torch.empty(size, dtype=torch.uint8, device="meta"))
        assert cluster.transfer_s(0, 1, size) == pytest.approx(seconds, rel=0.1)
    assert host.half_duplex == half_duplex
    assert cluster.messages_in_order
    assert (device.kind, device.message_s, device.message_bytes_per_s) == ("H100", 0.0, 0.0)


@pytest.mark.parametrize("crowded", [1.0, 2.0])
def test_gpus_with_ports_of_their_own_do_not_wait_for_one_another(
    monkeypatch: pytest.MonkeyPatch, crowded: float
) -> None:
    """A pair inside each host, then each rank with its like, then both of these pairs at once."""
    channel = KnownChannel(
        40e-6, 5e10, 0.0, 1e12, ranks_of_a_host=2, crowded=crowded, quiet_rounds=3
    )
    cluster = measured_between_gpus(monkeypatch, channel)
    assert channel.quiet_rounds == -1
    assert cluster.uses_port(0, 2) == cluster.uses_port(3, 0) == (crowded == 2.0)
    for way in ((0, 2), (3, 0), (0, 1)):
        assert cluster.bandwidth(*way) == pytest.approx(5e10, rel=1e-6)
        assert cluster.latency(*way) == pytest.approx(40e-6, rel=1e-6)


def test_links_inside_a_host_are_as_fast_as_they_are_together() -> None:
    gpus = [member("a", "T4") for _ in range(4)]
    for crowded, rate in ((1.1, 8e9), (2.0, 4e9)):
        quiet, busy = MeasuredLink(1e-5, 8e9), MeasuredLink(1e-5, 8e9, crowded=crowded)
        figures = {pair: busy if pair in ((0, 1), (2, 3)) else quiet for pair in PAIRS_OF_FOUR}
        assert cluster_of(gpus, figures).bandwidth(0, 2) == rate


def test_interleaved_hosts_are_refused() -> None:
    figures = {
        (0, 1): MeasuredLink(0, 1e9),
        (0, 2): MeasuredLink(0, 1e9),
        (1, 2): MeasuredLink(0, 1e9),
    }
    with pytest.raises(BadInput, match="interleaved"):
        cluster_of([member("a"), member("b"), member("a")], figures)


def test_without_a_process_group_the_message_says_what_to_call() -> None:
    with pytest.raises(BadInput, match="init_process_group"):
        measure_links()
