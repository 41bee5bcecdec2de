"""The links between all pairs of devices, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster


@dataclass(frozen=True)
class LinkMatrices:
    """The links from each device (row) to each device (column), shape (devices, devices).

    The diagonal has the numbers of the links inside the device's host.
    """

    bytes_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    uses_port: NDArray[np.bool_]


def link_matrices(cluster: Cluster) -> LinkMatrices:
    """`Cluster.bandwidth`, `Cluster.latency` and `Cluster.uses_port` for all pairs."""
    of_device = np.array(cluster.host_index, dtype=np.int64)
    same = of_device[:, None] == of_device[None, :]

    def by_rule(
        inside: Sequence[float], ports: Sequence[float], slower: np.ufunc
    ) -> NDArray[np.float64]:
        own = np.array(inside, dtype=np.float64)[of_device]
        port = np.array(ports, dtype=np.float64)[of_device]
        return np.where(same, own[:, None], slower(port[:, None], port[None, :]))

    hosts = cluster.hosts
    bytes_per_s = by_rule(
        [host.link_bytes_per_s for host in hosts],
        [host.port_bytes_per_s for host in hosts],
        np.minimum,
    )
    latency_s = by_rule(
        [host.link_latency_s for host in hosts],
        [host.port_latency_s for host in hosts],
        np.maximum,
    )
    uses_port = ~same
    for link in cluster.links:
        bytes_per_s[link.source, link.target] = link.bytes_per_s
        latency_s[link.source, link.target] = link.latency_s
        uses_port[link.source, link.target] = False
    return LinkMatrices(bytes_per_s, latency_s, uses_port)
