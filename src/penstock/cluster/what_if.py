"""Changes of a cluster for what-if questions: link rates, latencies, the speed of a device."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.quantities import Dimension, parse_quantity
from penstock.errors import BadInput

__all__ = [
    "DeviceChange",
    "NumberChange",
    "read_bandwidth_change",
    "read_device_change",
    "read_latency_change",
    "with_device_change",
    "with_link_bandwidth",
    "with_link_latency",
]

FACTOR = re.compile(r"\s*(?:[x\N{MULTIPLICATION SIGN}]\s*([\d.]+(?:e[-+]?\d+)?)|([\d.]+)\s*x)\s*")
DEVICE = re.compile(r"\s*(\d+)[\s:]+(slower|faster)[\s:]+([\d.]+)\s*%\s*")


@dataclass(frozen=True, slots=True)
class NumberChange:
    """A change of a rate (bytes per second) or a latency (seconds): a factor, or a new value."""

    figure: float
    is_factor: bool

    def of(self, before: float) -> float:
        """The changed number. With a factor, 0 (there is no such link) stays 0.

        >>> NumberChange(2.0, is_factor=True).of(5.0), NumberChange(2.0, is_factor=False).of(5.0)
        (10.0, 2.0)
        """
        return self.figure * before if self.is_factor else self.figure


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """A device that becomes slower or faster by ``part``: 0.2 for 20 %.

    20 % slower means that it takes 1.2 times as long, 20 % faster that it does 1.2 times as much.
    """

    device: int
    direction: Literal["slower", "faster"]
    part: float

    @property
    def speed_factor(self) -> float:
        """The factor of the device's speed."""
        return 1 + self.part if self.direction == "faster" else 1 / (1 + self.part)


def read_bandwidth_change(text: str) -> NumberChange:
    """Parse a change of rates: a factor, or a rate.

    >>> read_bandwidth_change("x2"), read_bandwidth_change("10 GB/s")
    (NumberChange(figure=2.0, is_factor=True), NumberChange(figure=10000000000.0, is_factor=False))

    Raises:
        BadInput: neither, or not above 0.
    """
    change = read_number_change(text, "bandwidth", "link bandwidth", "x2, x0.5 or 10GB/s")
    if not change.figure > 0:
        raise BadInput(f"link bandwidth '{text}' must be > 0; write x2, x0.5 or 10GB/s")
    return change


def read_latency_change(text: str) -> NumberChange:
    """Parse a change of latencies: a factor, or a time.

    >>> read_latency_change("x0.5"), read_latency_change("5us")
    (NumberChange(figure=0.5, is_factor=True), NumberChange(figure=5e-06, is_factor=False))

    Raises:
        BadInput: neither, or below 0.
    """
    return read_number_change(text, "time", "link latency", "x2, x0.5 or 5us")


def read_number_change(text: str, dimension: Dimension, thing: str, forms: str) -> NumberChange:
    """Parse a factor or a quantity; ``thing`` and ``forms`` are used in error messages."""
    try:
        if match := FACTOR.fullmatch(text):
            change = NumberChange(float(match[1] or match[2]), is_factor=True)
        else:
            change = NumberChange(parse_quantity(text, dimension), is_factor=False)
    except ValueError as error:
        raise BadInput(f"{thing} '{text}' is not a change: {error}; write {forms}") from None
    if not (change.figure >= 0 and isfinite(change.figure)):
        raise BadInput(f"{thing} '{text}' must be finite and >= 0; write {forms}")
    return change


def read_device_change(text: str) -> DeviceChange:
    """Parse a change of one device's speed.

    >>> read_device_change("3 slower 20 %")
    DeviceChange(device=3, direction='slower', part=0.2)
    >>> read_device_change("3:faster:50%").speed_factor
    1.5

    Raises:
        BadInput: the text has another form.
    """
    match = DEVICE.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        part = float(match[3]) / 100
    except ValueError:
        raise BadInput(
            f"device change '{text}' cannot be read; write the device's number, slower or faster, "
            f"and percent: '3 slower 20 %' or 3:slower:20%"
        ) from None
    return DeviceChange(int(match[1]), "faster" if match[2] == "faster" else "slower", part)


def with_link_bandwidth(cluster: Cluster, change: NumberChange) -> Cluster:
    """The cluster with the rates of all links and ports changed; missing ones stay missing."""

    def host_with(host: Host) -> Host:
        return replace(
            host,
            link_bytes_per_s=host.link_bytes_per_s and change.of(host.link_bytes_per_s),
            port_bytes_per_s=host.port_bytes_per_s and change.of(host.port_bytes_per_s),
        )

    links = tuple(replace(k, bytes_per_s=change.of(k.bytes_per_s)) for k in cluster.links)
    return replace(with_hosts(cluster, host_with), links=links)


def with_link_latency(cluster: Cluster, change: NumberChange) -> Cluster:
    """The cluster with the latencies of all links and ports changed."""

    def host_with(host: Host) -> Host:
        return replace(
            host,
            link_latency_s=change.of(host.link_latency_s),
            port_latency_s=change.of(host.port_latency_s),
        )

    links = tuple(replace(k, latency_s=change.of(k.latency_s)) for k in cluster.links)
    return replace(with_hosts(cluster, host_with), links=links)


def with_device_change(cluster: Cluster, change: DeviceChange) -> Cluster:
    """The cluster with one device slower or faster.

    Raises:
        BadInput: the cluster has no such device.
    """
    last = len(cluster.devices) - 1
    if change.device > last:
        raise BadInput(
            f"cluster '{cluster.name}' has no device {change.device}; its devices are 0..{last}"
        )
    hosts: list[Host] = []
    first = 0
    for host in cluster.hosts:
        devices = tuple(
            faster(device, change.speed_factor) if first + i == change.device else device
            for i, device in enumerate(host.devices)
        )
        hosts.append(replace(host, devices=devices))
        first += len(devices)
    return replace(cluster, hosts=tuple(hosts))


def faster(device: Device, factor: float) -> Device:
    """The device with its speed multiplied."""
    return replace(device, speed=device.speed * factor)


def with_hosts(cluster: Cluster, change: Callable[[Host], Host]) -> Cluster:
    """The cluster with every host changed."""
    return replace(cluster, hosts=tuple(change(host) for host in cluster.hosts))
