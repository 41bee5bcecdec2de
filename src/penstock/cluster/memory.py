"""Copies of a cluster with more or less memory on its devices."""

from collections.abc import Callable
from dataclasses import replace
from math import isclose

from penstock.cluster.cluster import Cluster, Device

__all__ = ["with_boundless_memory", "with_memory_reserve"]

ROUNDING = 1e-12
"""Reserves that differ by a smaller share are equal."""

BOUNDLESS_BYTES = 1e30
"""Stands for unlimited memory."""


def with_boundless_memory(cluster: Cluster) -> Cluster:
    """The cluster with unlimited memory on every device."""
    return with_devices(cluster, lambda d: replace(d, memory_bytes=BOUNDLESS_BYTES))


def with_memory_reserve(cluster: Cluster, share: float) -> Cluster:
    """The cluster with a fraction ``share`` of the whole memory of every device kept free.

    An earlier reserve is replaced, not added to. A cluster with this very reserve is returned as it
    is, with all that it has cached.
    """

    def reserved(device: Device) -> Device:
        whole = device.memory_bytes + device.reserved_bytes
        kept = whole * share if share else 0.0
        return replace(device, memory_bytes=whole * (1 - share), reserved_bytes=kept)

    wanted = (
        (d.reserved_bytes, share * (d.memory_bytes + d.reserved_bytes)) for d in cluster.devices
    )
    if all(isclose(kept, bytes_kept, rel_tol=ROUNDING) for kept, bytes_kept in wanted):
        return cluster
    return with_devices(cluster, reserved)


def with_devices(cluster: Cluster, changed: Callable[[Device], Device]) -> Cluster:
    """The cluster with ``changed`` applied to every device."""
    hosts = tuple(replace(h, devices=tuple(map(changed, h.devices))) for h in cluster.hosts)
    return replace(cluster, hosts=hosts)
