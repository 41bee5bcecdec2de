"""A cluster as a weighted graph of its devices."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.plan.run_tables import Floats

__all__ = ["LinkArrays", "device_weights", "link_arrays"]


@dataclass(frozen=True)
class LinkArrays:
    """Latency, seconds per byte and use of ports between every two devices of an order.

    ``host`` numbers the host of each device.
    """

    latency_s: Floats
    s_per_byte: Floats
    uses_port: NDArray[np.bool_]
    host: NDArray[np.int64]


def link_arrays(cluster: Cluster, order: tuple[int, ...]) -> LinkArrays:
    """The links between the devices of ``order``, in that order."""
    host = np.array([cluster.host_index[device] for device in order])
    bytes_per_s, latency_s = host_figures(cluster, host)
    uses_port = host[:, None] != host[None, :]
    place = {device: position for position, device in enumerate(order)}
    for link in cluster.links:
        if link.source in place and link.target in place:
            i, j = place[link.source], place[link.target]
            bytes_per_s[i, j], latency_s[i, j] = link.bytes_per_s, link.latency_s
            uses_port[i, j] = False
    with np.errstate(divide="ignore"):
        return LinkArrays(latency_s, 1 / bytes_per_s, uses_port, host)


def host_figures(cluster: Cluster, host: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Bandwidth and latency between devices of the given hosts by the rule of the hierarchy."""
    hosts = cluster.hosts
    port = np.array([h.port_bytes_per_s for h in hosts])[host]
    inside = np.array([h.link_bytes_per_s for h in hosts])[host]
    port_latency = np.array([h.port_latency_s for h in hosts])[host]
    inside_latency = np.array([h.link_latency_s for h in hosts])[host]
    same = host[:, None] == host[None, :]
    bytes_per_s = np.where(same, inside[:, None], np.minimum(port[:, None], port[None, :]))
    latency = np.maximum(port_latency[:, None], port_latency[None, :])
    return bytes_per_s, np.where(same, inside_latency[:, None], latency)


def device_weights(cluster: Cluster) -> Floats:
    """Bytes per second between every two devices, the mean of both directions; 0 to itself.

    A port is shared by all devices of its host, so a pair counts with the part that each device
    of the larger host has when all of them talk at once: with the whole port for every pair, a
    host of eight would seem to be tied to the next by 64 ports.
    """
    order = tuple(range(len(cluster.devices)))
    links = link_arrays(cluster, order)
    sharing = np.bincount(links.host)[links.host]
    with np.errstate(divide="ignore"):
        rate = 1 / links.s_per_byte
    shared = np.maximum(sharing[:, None], sharing[None, :])
    weights = np.where(links.uses_port, rate / shared, rate)
    weights = (weights + weights.T) / 2
    np.fill_diagonal(weights, 0.0)
    finite = weights[np.isfinite(weights)]
    # A link without a limit is only ever compared: more than all others together will do.
    most = 2 * float(finite.sum()) + 1.0
    return np.where(np.isfinite(weights), weights, most)
