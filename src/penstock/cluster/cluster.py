"""Devices, hosts and the links between them."""

from dataclasses import dataclass
from functools import cached_property

from penstock.errors import BadInput

__all__ = ["Cluster", "Device", "Host", "Link"]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or worker: a name of its kind, its memory, and its speed.

    ``speed`` is relative to the device that was profiled: 2.0 halves every compute time.
    """

    kind: str
    memory_bytes: float
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Host:
    """Devices joined by fast links, sharing one network port to the other hosts.

    ``link_bytes_per_s`` and ``link_latency_s`` hold between any two devices of the host,
    ``port_bytes_per_s`` and ``port_latency_s`` for its port, in each direction. At most
    ``full_speed_devices`` devices compute at full speed at once (0: all of them): workers that
    share too few CPU cores slow one another down in proportion.
    """

    name: str
    devices: tuple[Device, ...]
    link_bytes_per_s: float
    port_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0
    port_latency_s: float = 0.0
    full_speed_devices: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link that replaces the hierarchical rate between two devices (by index)."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Hosts with their devices, numbered through in order, and links that differ from the rule.

    Raises:
        BadInput: no devices, or a rate, speed, memory or latency that no hardware has.
    """

    name: str
    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        check_cluster(self)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices in order: those of the first host, then of the second, and so on."""
        return tuple(device for host in self.hosts for device in host.devices)

    @cached_property
    def host_index(self) -> tuple[int, ...]:
        """For each device the index of its host."""
        return tuple(index for index, host in enumerate(self.hosts) for _ in host.devices)

    @cached_property
    def special_links(self) -> dict[tuple[int, int], Link]:
        """The explicit links by (source, target)."""
        return {(link.source, link.target): link for link in self.links}

    def uses_port(self, source: int, target: int) -> bool:
        """Whether a message between the two devices passes the shared ports of their hosts."""
        same_host = self.host_index[source] == self.host_index[target]
        return not same_host and (source, target) not in self.special_links

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second from one device to another when nothing else is on the wire."""
        if link := self.special_links.get((source, target)):
            return link.bytes_per_s
        sender, receiver = self.hosts[self.host_index[source]], self.hosts[self.host_index[target]]
        if self.host_index[source] == self.host_index[target]:
            return sender.link_bytes_per_s
        return min(sender.port_bytes_per_s, receiver.port_bytes_per_s)

    def latency(self, source: int, target: int) -> float:
        """Seconds before the first byte of a message arrives."""
        if link := self.special_links.get((source, target)):
            return link.latency_s
        sender, receiver = self.hosts[self.host_index[source]], self.hosts[self.host_index[target]]
        if self.host_index[source] == self.host_index[target]:
            return sender.link_latency_s
        return max(sender.port_latency_s, receiver.port_latency_s)

    def transfer_s(self, source: int, target: int, size_bytes: float) -> float:
        """Seconds for one message alone on its way; nothing from a device to itself."""
        if source == target or size_bytes <= 0:
            return 0.0
        return self.latency(source, target) + size_bytes / self.bandwidth(source, target)


def check_cluster(cluster: Cluster) -> None:
    """Raise `BadInput` for a cluster that cannot exist or cannot carry a message."""
    if not cluster.devices:
        raise BadInput(f"cluster '{cluster.name}' has no devices; add a [[hosts]] entry")
    for host in cluster.hosts:
        for device in host.devices:
            if not (device.memory_bytes > 0 and 0 < device.speed < float("inf")):
                raise BadInput(
                    f"cluster '{cluster.name}', host '{host.name}': device '{device.kind}' has "
                    f"memory {device.memory_bytes} B and speed {device.speed}; both must be > 0"
                )
        rates = {
            "link_bytes_per_s": (host.link_bytes_per_s, len(host.devices) > 1),
            "port_bytes_per_s": (host.port_bytes_per_s, len(cluster.hosts) > 1),
        }
        for figure, (rate, needed) in rates.items():
            if needed and not rate > 0:
                raise BadInput(
                    f"cluster '{cluster.name}', host '{host.name}': {figure} is {rate}; devices "
                    f"that cannot reach each other cannot share a pipeline; give a rate > 0"
                )
        if host.link_latency_s < 0 or host.port_latency_s < 0 or host.full_speed_devices < 0:
            raise BadInput(
                f"cluster '{cluster.name}', host '{host.name}': latencies and "
                f"full_speed_devices must be >= 0"
            )
    for link in cluster.links:
        ends_exist = all(0 <= end < len(cluster.devices) for end in (link.source, link.target))
        if not ends_exist or link.bytes_per_s <= 0 or link.latency_s < 0:
            raise BadInput(
                f"cluster '{cluster.name}': link {link.source} -> {link.target} at "
                f"{link.bytes_per_s} B/s, latency {link.latency_s} s: ends must be devices "
                f"0..{len(cluster.devices) - 1}, the rate > 0 and the latency >= 0"
            )
