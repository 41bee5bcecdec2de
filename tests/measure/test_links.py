"""Links of a live process group are measured, and every rank learns the same."""

from pathlib import Path

import pytest

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

PAIRS_OF_FOUR = [(i, j) for i in range(4) for j in range(i + 1, 4)]


def member(host: str, kind: str = "cpu") -> Member:
    return Member(host, kind, 8e9, 2 if kind == "cpu" else 0)


def test_a_live_group_measures_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from link_workers import measured

    clusters = launch_workers(measured, workers=2)
    assert clusters[0] == clusters[1]
    (host,) = clusters[0].hosts
    assert len(host.devices) == 2
    assert 1e7 < host.link_bytes_per_s < 1e12
    assert 0 <= host.link_latency_s < 0.05
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
    (host,) = cluster_of([member("a")] * 4, figures).hosts
    assert host.full_speed_devices == 2
    assert [device.memory_bytes for device in host.devices] == [2e9] * 4


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
