"""Cluster files, presets, and what is said of wrong ones."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import clusters

from penstock.cluster import toml_file
from penstock.cluster.cluster import Cluster, Device, Host, Link, unknown_memory_words
from penstock.cluster.collectives import best_ring
from penstock.cluster.toml_file import (
    CLUSTERS,
    cluster_from_toml,
    find_cluster,
    local_cluster,
    parse_quantity,
    read_cluster,
    write_cluster,
)
from penstock.errors import BadInput
from penstock.measure.hardware import hardware_named
from penstock.planners.tensor_groups import grouped_cluster, one_each

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "clusters.md"

TWO_HOSTS = """
name = "two hosts"

[[hosts]]
name = "a"
count = 2
link_bandwidth = "130 GB/s"
link_latency = "5 us"
port_bandwidth = "25 Gb/s"
port_latency = 30e-6

[[hosts.devices]]
kind = "V100-16GB"
memory = "16 GB"
count = 8
"""


def test_units_are_read_as_people_write_them():
    cluster = cluster_from_toml(TWO_HOSTS, "c.toml")
    assert [host.name for host in cluster.hosts] == ["a0", "a1"]
    assert cluster.devices == (Device("V100-16GB", 16e9),) * 16
    assert cluster.bandwidth(0, 8) == 25e9 / 8
    assert cluster.latency(0, 1) == 5e-6


def test_the_memory_of_a_host_is_its_own_and_may_be_unknown():
    cluster = cluster_from_toml(TWO_HOSTS, "c.toml")
    assert unknown_memory_words(cluster).startswith("host memory unknown: [[hosts]] 'a0'")
    told = cluster_from_toml(TWO_HOSTS.replace("count = 2", 'memory = "1 TB"\ncount = 2'), "c.toml")
    assert [host.memory_bytes for host in told.hosts] == [1e12, 1e12]
    assert told.devices == cluster.devices
    assert unknown_memory_words(told) == unknown_memory_words(local_cluster(2, 2, 8e9)) == ""


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("16 GiB", "memory", 16 * 2**30),
        ("1.5kB", "memory", 1500),
        ("10 Gb/s", "bandwidth", 1.25e9),
        ("2e3 MB/s", "bandwidth", 2e9),
        ("3 ms", "time", 3e-3),
        ("7 µs", "time", 7e-6),
    ],
)
def test_quantities(text: str, dimension: str, value: float):
    assert parse_quantity(text, dimension) == pytest.approx(value)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(clusters(), st.text(max_size=5))
def test_every_cluster_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, name: str
):
    path = tmp_path_factory.mktemp("clusters") / "c.toml"
    last = len(cluster.devices) - 1
    links = (Link(0, last, 2.5, 0.125),) if last else ()
    named = Cluster(name, cluster.hosts, links)
    write_cluster(named, path)
    assert read_cluster(path) == named


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_preset_survives_a_round_trip(name: str, tmp_path: Path):
    write_cluster(find_cluster(name), tmp_path / "c.toml")
    assert find_cluster(tmp_path / "c.toml") == CLUSTERS[name]()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("port_bandwidth", "port_bandwith", ["hosts[0]", "did you mean 'port_bandwidth'"]),
        ("memory", "vram", ["hosts[0].devices[0]", "vram", "kind, memory, speed, over"]),
        ("16 GB", "16 XB", ["hosts[0].devices[0].memory", "16 XB", "GiB"]),
        ("25 Gb/s", "25 Gb", ["hosts[0].port_bandwidth", "25 Gb", "Gb/s"]),
        ("25 Gb/s", "0 Gb/s", ["'a0'", "port_bandwidth", "0.0", "> 0"]),
        ('"130 GB/s"', "[]", ["hosts[0].link_bandwidth", "[]", "number"]),
        ("count = 8", "count = 0", ["hosts[0].devices[0].count", "0", "1"]),
        ('memory = "16 GB"', "", ["hosts[0].devices[0].memory", "missing"]),
        ('"two hosts"', '"two', ["not valid TOML", "line 2"]),
        ('"16 GB"', "-1.0", ["memory -1.0", "> 0"]),
        (
            "count = 8",
            "on_chip_memory = -1.0",
            ["'a0'", "on_chip_memory is -1.0", ">= 0"],
        ),
        (
            "count = 8",
            "overlaps_communication = false\nconcurrent_passes = true",
            ["'a0'", "concurrent_passes", "overlaps_communication"],
        ),
        ("count = 8", 'on_chip_memory = "1 MB"', ["on_chip_memory 1000000.0", "give the rate"]),
        ("count = 8", 'off_chip_bandwidth = "1 MB"', ["off_chip_bandwidth", "1 MB", "GB/s"]),
        ("count = 8", "overlaps_communication = 1", ["overlaps_communication", "1", "boolean"]),
        ("count = 8", "overlap = true", ["unknown key 'overlap'"]),
        ("port_latency = 30e-6", 'half_duplex = "yes"', ["hosts[0].half_duplex", "yes", "boolean"]),
    ],
)
def test_a_wrong_cluster_is_answered_with_place_value_and_remedy(
    old: str, new: str, words: list[str]
):
    assert old in TWO_HOSTS
    with pytest.raises(BadInput) as caught:
        cluster_from_toml(TWO_HOSTS.replace(old, new), "folder/c.toml")
    message = str(caught.value)
    assert all(word in message for word in ["folder/c.toml", *words]), message
    assert "\n" not in message


PASSES = "concurrent_passes = true"


def test_duplex_overlap_and_the_memory_on_a_chip_are_read_and_written_back(tmp_path: Path):
    links = "half_duplex = true\nseparate_links = true\n"
    board = links + '[[hosts.devices]]\nkind = "FPGA"\nmemory = "8 GB"\n'
    chip = 'on_chip_memory = "40 MiB"\noff_chip_bandwidth = "38.4 GB/s"\n'
    text = TWO_HOSTS.split("[[hosts.devices]]")[0] + board + chip + "overlaps_communication = false"
    cluster = cluster_from_toml(text, "c.toml")
    assert [host.half_duplex for host in cluster.hosts] == [True, True]
    assert [host.separate_links for host in cluster.hosts] == [True, True]
    assert cluster.devices == (Device("FPGA", 8e9, 1.0, False, 40 * 2**20, 38.4e9),) * 2
    write_cluster(cluster, tmp_path / "c.toml")
    assert read_cluster(tmp_path / "c.toml") == cluster
    usual = cluster_from_toml(TWO_HOSTS, "c.toml")
    assert not usual.hosts[0].half_duplex
    assert not usual.hosts[0].separate_links
    assert usual.devices[0].overlaps_communication
    assert not usual.devices[0].concurrent_passes
    both = cluster_from_toml(text.replace("overlaps_communication = false", PASSES), "c.toml")
    assert all(device.concurrent_passes for device in both.devices)
    write_cluster(both, tmp_path / "both.toml")
    assert read_cluster(tmp_path / "both.toml") == both


def test_whether_messages_go_in_order_is_read_and_written_back(tmp_path: Path):
    usual = cluster_from_toml(TWO_HOSTS, "c.toml")
    in_order = cluster_from_toml(f'messages = "in order"\n{TWO_HOSTS}', "c.toml")
    assert in_order == replace(usual, messages_in_order=True) != usual
    write_cluster(in_order, tmp_path / "c.toml")
    assert read_cluster(tmp_path / "c.toml") == in_order
    assert cluster_from_toml(f'messages = "as ready"\n{TWO_HOSTS}', "c.toml") == usual
    assert in_order.first(1).messages_in_order
    assert grouped_cluster(in_order, one_each(in_order)).messages_in_order
    with pytest.raises(BadInput, match="messages"):
        cluster_from_toml(f'messages = "sorted"\n{TWO_HOSTS}', "c.toml")


def hosts_without_ports(devices: int) -> tuple[Host, ...]:
    return tuple(Host(f"h{i}", (Device("d", 1e9),), 0.0) for i in range(devices))


def all_pairs(devices: int) -> list[Link]:
    return [Link(i, j, 1e9) for i in range(devices) for j in range(devices) if i != j]


def test_a_cluster_of_explicit_links_alone_needs_no_ports():
    cluster = Cluster("graph", hosts_without_ports(3), tuple(all_pairs(3)))
    assert cluster.transfer_s(2, 0, 1e9) == 1.0
    one_host = Host("h", (Device("d", 1e9),) * 2, link_bytes_per_s=0.0)
    assert Cluster("pair", (one_host,), (Link(0, 1, 1.0), Link(1, 0, 2.0))).bandwidth(1, 0) == 2.0


@pytest.mark.parametrize(
    ("links", "words"),
    [
        (all_pairs(3)[:-1], ["device 2 cannot reach device 1", "'h1'", "no link 2 -> 1"]),
        (all_pairs(3)[1:], ["device 0 cannot reach device 1", "'h0'", "port_bytes_per_s"]),
        ([], ["device 0 cannot reach device 1", "add the link"]),
        ([*all_pairs(3), Link(0, 1, 5.0)], ["link 0 -> 1", "given twice"]),
        ([*all_pairs(3), Link(1, 1, 5.0)], ["link 1 -> 1", "itself"]),
        ([Link(0, 1, 0.0)], ["link 0 -> 1", "rate 0.0", "> 0"]),
        ([Link(0, 1, float("nan"))], ["link 0 -> 1", "nan"]),
        ([Link(0, 1, 1.0, float("nan"))], ["link 0 -> 1", "latency_s is nan"]),
        ([Link(0, 3, 1.0)], ["link 0 -> 3", "0..2"]),
    ],
)
def test_devices_that_cannot_reach_each_other_are_named(links: list[Link], words: list[str]):
    with pytest.raises(BadInput) as caught:
        Cluster("graph", hosts_without_ports(3), tuple(links))
    assert all(word in str(caught.value) for word in ["'graph'", *words]), str(caught.value)


def test_an_unknown_cluster_is_answered_with_the_presets():
    with pytest.raises(
        BadInput, match=r"'dapple-z' .*dapple-a, .*dapple-b, .*did you mean 'dapple-"
    ):
        find_cluster("dapple-z")


def test_local_workers_share_cores_and_memory():
    cluster = local_cluster(4, cores=2, memory_bytes=8e9)
    assert cluster.hosts == (
        Host("localhost", (Device("cpu", 2e9),) * 4, 2e9, 0.0, 1e-4, 0.0, full_speed_devices=2),
    )
    assert local_cluster(2, cores=4, memory_bytes=8e9).hosts[0].full_speed_devices == 0
    with pytest.raises(BadInput, match="0 local workers"):
        local_cluster(0, cores=2, memory_bytes=8e9)


def test_the_example_of_the_guide_is_a_cluster():
    example = GUIDE.read_text().split("```toml\n")[1].split("```")[0]
    cluster = cluster_from_toml(example, GUIDE)
    assert len(cluster.devices) == 16
    assert cluster.bandwidth(0, 8) == 12.5e9


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_preset_is_named_like_its_file_says_its_sources_and_is_in_the_guide(name: str):
    files = Path(toml_file.__file__).parent / "presets"
    assert CLUSTERS[name]().name == name
    text = (files / f"{name}.toml").read_text()
    comment = [line for line in text.splitlines() if line.startswith("# ")]
    assert len(comment) >= 1
    assert all(len(line) <= 110 for line in comment)
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1
    assert f" {len(CLUSTERS[name]().devices)} |" in rows[0]


@pytest.mark.parametrize(
    ("name", "devices", "inside", "between"),
    [
        ("dapple-a", 16, 25e9, 3.125e9),
        ("dapple-b", 16, 25e9, 3.125e9),
        ("dapple-c", 16, 25e9, 1.25e9),
        ("dapple-a-effective", 16, 25e9, 3.0e9),
        ("dapple-c-effective", 16, 25e9, 1.25e9),
        ("h100-pod-1024", 1024, 450e9, 400e9),
        ("a100-8", 8, 300e9, 300e9),
        ("h100-8", 8, 450e9, 450e9),
        ("rtx4090-2x4", 8, 12.5e9, 1.25e9),
        ("dgx-spark-2", 2, 0, 12e9),
    ],
)
def test_presets_have_the_published_rates(name: str, devices: int, inside: float, between: float):
    cluster = CLUSTERS[name]()
    assert len(cluster.devices) == devices
    assert cluster.hosts[0].link_bytes_per_s == inside
    assert cluster.bandwidth(0, devices - 1) == between


@pytest.mark.parametrize(
    "name", [name for name in CLUSTERS if name.startswith(("a100-", "h100-8", "rtx", "dgx"))]
)
def test_estimates_know_the_devices_of_presets_of_today(name: str):
    first = CLUSTERS[name]().devices[0]
    assert first.speed == 1.0
    for device in CLUSTERS[name]().devices:
        known = hardware_named(device.kind)
        assert device.memory_bytes == known.memory_bytes
        assert device.peak_flops_per_s == known.half_flops_per_s
        ratio = known.half_flops_per_s / hardware_named(first.kind).half_flops_per_s
        assert device.speed == pytest.approx(ratio, rel=0.01)


def test_the_graph_preset_is_asymmetric_and_its_best_ring_is_the_fast_one():
    cluster = CLUSTERS["graph-8"]()
    assert cluster.bandwidth(0, 3) == 25e9 / 8
    assert cluster.bandwidth(3, 0) == 10e9 / 8
    assert best_ring(cluster, range(8)) == [0, 3, 6, 1, 4, 7, 2, 5]


def test_a_cluster_has_at_most_65536_devices_and_is_read_at_once(tmp_path: Path):
    path = tmp_path / "large.toml"
    text = (
        '[[hosts]]\nname = "h"\ncount = {}\n[[hosts.devices]]\nkind = "d"\nmemory = 1\ncount = {}'
    )
    path.write_text('name = "large"\n' + text.format(65536, 1))
    with pytest.raises(BadInput, match="device 0 cannot reach device 1"):
        read_cluster(path)
    path.write_text('name = "large"\n' + text.format(65536, 65536))
    with pytest.raises(BadInput, match="has 4294967296 devices; at most 65536"):
        read_cluster(path)
