"""A part of a cluster, for the ranks that are left when a host is lost."""

import pytest

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.errors import BadInput

CORE = Device("core", 1e9)
PAIR = Host("pair", (CORE, CORE), 5e9, port_bytes_per_s=1e9)
TRIPLE = Host("triple", (CORE, CORE, CORE), 6e9, port_bytes_per_s=1e9)
LINKS = (Link(0, 1, 2e9), Link(1, 2, 3e9), Link(3, 4, 4e9))


def test_the_first_devices_keep_their_hosts_and_the_links_among_them() -> None:
    whole = Cluster("two hosts", (PAIR, TRIPLE), LINKS)
    part = whole.first(3)
    assert [(host.name, len(host.devices)) for host in part.hosts] == [("pair", 2), ("triple", 1)]
    assert part.links == LINKS[:2]
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    assert [part.bandwidth(i, j) for i, j in pairs] == [whole.bandwidth(i, j) for i, j in pairs]
    assert whole.first(2) == Cluster("two hosts", (PAIR,), LINKS[:1])
    assert whole.first(5) == whole


@pytest.mark.parametrize("devices", [0, 6])
def test_a_cluster_has_no_more_devices_than_it_has(devices: int) -> None:
    with pytest.raises(BadInput, match=f"has 5 devices, so it has no first {devices}; describe"):
        Cluster("two hosts", (PAIR, TRIPLE)).first(devices)
