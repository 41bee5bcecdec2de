"""The same cluster with more or less memory on its devices."""

from collections.abc import Callable
from dataclasses import replace

from penstock.cluster.cluster import Cluster, Device

__all__ = ["with_boundless_memory", "with_memory_reserve"]

BOUNDLESS_BYTES = 1e30
"""More memory than any device has."""


def with_boundless_memory(cluster: Cluster) -> Cluster:
    """The cluster where memory is no limit."""
    return with_devices(cluster, lambda d: replace(d, memory_bytes=BOUNDLESS_BYTES))


def with_memory_reserve(cluster: Cluster, share: float) -> Cluster:
    """The cluster with so large a share of all memory of every device kept free.

    What was kept free before counts as memory.
    """

    def reserved(device: Device) -> Device:
        whole = device.memory_bytes + device.reserved_bytes
        kept = whole * share if share else 0.0
        return replace(device, memory_bytes=whole * (1 - share), reserved_bytes=kept)

    if not share and not any(device.reserved_bytes for device in cluster.devices):
        return cluster
    return with_devices(cluster, reserved)


def with_devices(cluster: Cluster, changed: Callable[[Device], Device]) -> Cluster:
    """The cluster with every device changed."""
    hosts = tuple(replace(h, devices=tuple(map(changed, h.devices))) for h in cluster.hosts)
    return replace(cluster, hosts=hosts)
