"""A cluster as a weighted graph of its devices."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.cluster.link_matrices import link_matrices
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
    links, square = link_matrices(cluster), np.ix_(order, order)
    host = np.array([cluster.host_index[device] for device in order])
    with np.errstate(divide="ignore"):
        s_per_byte = 1 / links.bytes_per_s[square]
    return LinkArrays(links.latency_s[square], s_per_byte, links.uses_port[square], host)


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
