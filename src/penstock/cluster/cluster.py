"""Devices, hosts and the links between them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, permutations, product
from math import isclose

from penstock.core.native import ChipMemory
from penstock.errors import BadInput
from penstock.text import html_table, rate_text, seconds_text, size_text

HOST_HEADS = ("host", "devices", "memory each", "links inside", "latency", "port", "latency")
"""Heads of `Cluster.host_rows`."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or worker. ``kind`` is the name of its model.

    ``speed`` is relative to the profiled device: 2.0 halves every compute time. A device without
    ``overlaps_communication`` computes nothing while it sends or receives, nor while a message of
    its own waits to be sent. One with ``concurrent_passes``, such as an FPGA, can run a forward and
    a backward at the same time, and streams: it sends a message beside the pass that makes it.

    ``memory_bytes`` is the memory that a plan may use; ``reserved_bytes`` is kept free beside it.
    If the parameters of a stage exceed ``on_chip_bytes``, every action reads them from off-chip
    memory. Without ``off_chip_bytes_per_s`` the device has no such memory.

    Sending or receiving a message keeps the device itself from computing for ``message_s``, and for
    its bytes at ``message_bytes_per_s`` (0: for no time), whatever the link: a CPU copies them.

    ``peak_flops_per_s`` is what a data sheet says for the precision that is trained in (0: not
    known). It serves to say the share of it that is used, and predicts nothing.
    """

    kind: str
    memory_bytes: float
    speed: float = 1.0
    overlaps_communication: bool = True
    on_chip_bytes: float = 0.0
    off_chip_bytes_per_s: float = 0.0
    reserved_bytes: float = 0.0
    concurrent_passes: bool = False
    message_s: float = 0.0
    message_bytes_per_s: float = 0.0
    peak_flops_per_s: float = 0.0

    @property
    def chip(self) -> ChipMemory:
        """Sizes and rates by which the core prices reads of off-chip memory."""
        return ChipMemory(self.on_chip_bytes, self.off_chip_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Host:
    """Devices joined by fast links, which share one network port to other hosts.

    ``link_bytes_per_s`` and ``link_latency_s`` hold between any two devices of the host,
    ``port_bytes_per_s`` and ``port_latency_s`` for its port, in each direction. At most
    ``full_speed_devices`` devices compute at full speed at once (0: all): workers that share too
    few CPU cores slow one another down in proportion. If ``half_duplex``, messages of both
    directions take turns, on each device's link and on the port. With ``separate_links`` every pair
    of devices of the host has its own link, so messages to or from different devices of the host do
    not wait for one another. ``price_per_hour`` is in any currency (0: not known).
    ``memory_bytes`` is the host's own memory, beside that of its devices (0: not known).
    """

    name: str
    devices: tuple[Device, ...]
    link_bytes_per_s: float
    port_bytes_per_s: float = 0.0
    link_latency_s: float = 0.0
    port_latency_s: float = 0.0
    full_speed_devices: int = 0
    half_duplex: bool = False
    separate_links: bool = False
    price_per_hour: float = 0.0
    memory_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link between two devices (by index); overrides the rates of their hosts."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, repr=False)
class Cluster:
    """Hosts with their devices, numbered throughout in order, and links that override host rates.

    ``messages_in_order``: a device sends and receives one message at a time, in the planned order
    (`penstock.schedule.message_order`), as ranks do that share one communicator of NCCL. Otherwise
    messages start in the order in which they are ready. ``sum_step_s`` is the least time of a step
    of an all-reduce, whatever the latency of its link: more than that of a message, where threads
    of a process group have to wake one another.

    Raises:
        BadInput: no devices; a rate, speed, memory or latency out of range; or two devices that
            cannot reach each other.
    """

    name: str
    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = ()
    messages_in_order: bool = False
    sum_step_s: float = 0.0

    def __post_init__(self) -> None:
        check_cluster(self)

    def __repr__(self) -> str:
        return f"Cluster('{self.name}', {len(self.hosts)} hosts, {len(self.devices)} devices)"

    def _repr_html_(self) -> str:
        return html_table(HOST_HEADS, self.host_rows(), repr(self))

    def host_rows(self) -> Iterator[tuple[str, ...]]:
        """The devices of each host, their links and the port, below `HOST_HEADS`."""
        for host in self.hosts:
            kinds = groupby(device.kind for device in host.devices)
            inside, port = host.link_bytes_per_s, host.port_bytes_per_s
            yield (
                host.name,
                ", ".join(f"{len(list(equal))} {kind}" for kind, equal in kinds),
                size_text(min(device.memory_bytes for device in host.devices)),
                *((rate_text(inside), seconds_text(host.link_latency_s)) if inside else ("-", "-")),
                *((rate_text(port), seconds_text(host.port_latency_s)) if port else ("-", "-")),
            )

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices in order: those of the first host, then of the second, and so on."""
        return tuple(device for host in self.hosts for device in host.devices)

    @property
    def price_per_hour(self) -> float:
        """The price of all hosts for an hour; 0 if that of some host is not known."""
        prices = [host.price_per_hour for host in self.hosts]
        return sum(prices) if all(prices) else 0.0

    @cached_property
    def host_index(self) -> tuple[int, ...]:
        """The index of the host of each device."""
        return tuple(index for index, host in enumerate(self.hosts) for _ in host.devices)

    @cached_property
    def slowing_hosts(self) -> dict[int, int]:
        """The hosts that not all devices compute on at full speed, and how many do."""
        full = {index: host.full_speed_devices for index, host in enumerate(self.hosts)}
        return {index: devices for index, devices in full.items() if devices}

    @cached_property
    def half_duplex_devices(self) -> frozenset[int]:
        """The devices that send and receive in turn."""
        hosts = enumerate(self.host_index)
        return frozenset(device for device, host in hosts if self.hosts[host].half_duplex)

    @cached_property
    def special_links(self) -> dict[tuple[int, int], Link]:
        """The explicit links by (source, target)."""
        return {(link.source, link.target): link for link in self.links}

    @cached_property
    def linked_devices(self) -> frozenset[int]:
        """The devices at which an explicit link begins or ends."""
        return frozenset(end for link in self.links for end in (link.source, link.target))

    @cached_property
    def host_kinds(self) -> tuple[int, ...]:
        """The index of the first host with the same rates and latencies, by host."""
        first: dict[tuple[float, ...], int] = {}
        return tuple(first.setdefault(rates_of(h), index) for index, h in enumerate(self.hosts))

    @cached_property
    def known_answers(self) -> dict[object, object]:
        """A cache for functions that compute something about this cluster."""
        return {}

    def first(self, devices: int) -> "Cluster":
        """The cluster of its first ``devices`` devices, with the links among them.

        Raises:
            BadInput: it has fewer devices.
        """
        if not 0 < devices <= len(self.devices):
            raise BadInput(
                f"cluster '{self.name}' has {len(self.devices)} devices, so it has no first "
                f"{devices}; describe a cluster with as many devices as there are ranks"
            )
        ends = accumulate(len(host.devices) for host in self.hosts)
        left = [devices - (end - len(h.devices)) for h, end in zip(self.hosts, ends, strict=True)]
        hosts = tuple(
            replace(host, devices=host.devices[:count])
            for host, count in zip(self.hosts, left, strict=True)
            if count > 0
        )
        links = tuple(link for link in self.links if max(link.source, link.target) < devices)
        return replace(self, hosts=hosts, links=links)

    def uses_port(self, source: int, target: int) -> bool:
        """Return whether a message between the two devices uses their hosts' shared ports."""
        host_index = self.host_index
        if host_index[source] == host_index[target]:
            return False
        return not self.links or (source, target) not in self.special_links

    def bandwidth(self, source: int, target: int) -> float:
        """Bytes per second from one device to another without contention."""
        if self.links and (link := self.special_links.get((source, target))):
            return link.bytes_per_s
        sender, receiver = self.host_index[source], self.host_index[target]
        if sender == receiver:
            return self.hosts[sender].link_bytes_per_s
        return min(self.hosts[sender].port_bytes_per_s, self.hosts[receiver].port_bytes_per_s)

    def latency(self, source: int, target: int) -> float:
        """Seconds before the first byte of a message arrives."""
        if self.links and (link := self.special_links.get((source, target))):
            return link.latency_s
        sender, receiver = self.host_index[source], self.host_index[target]
        if sender == receiver:
            return self.hosts[sender].link_latency_s
        return max(self.hosts[sender].port_latency_s, self.hosts[receiver].port_latency_s)

    def transfer_s(self, source: int, target: int, size_bytes: float) -> float:
        """Seconds of one message without contention; zero from a device to itself."""
        if source == target or size_bytes <= 0:
            return 0.0
        return self.latency(source, target) + size_bytes / self.bandwidth(source, target)


def rates_of(host: Host) -> tuple[float, ...]:
    """The numbers of a host that determine transfer times of its devices."""
    return (
        host.link_bytes_per_s,
        host.port_bytes_per_s,
        host.link_latency_s,
        host.port_latency_s,
        host.half_duplex,
        host.separate_links,
    )


def check_cluster(cluster: Cluster) -> None:
    """Raise `BadInput` unless the cluster's numbers are possible and all devices are connected."""
    if not cluster.devices:
        raise BadInput(f"cluster '{cluster.name}' has no devices; add a [[hosts]] entry")
    for host in cluster.hosts:
        check_host(cluster, host)
    check_figures(f"cluster '{cluster.name}'", cluster, "sum_step_s")
    streaming = [device.kind for device in cluster.devices if device.concurrent_passes]
    if cluster.messages_in_order and streaming:
        raise BadInput(
            f"cluster '{cluster.name}': device '{streaming[0]}' has concurrent_passes, but its "
            f"messages go in order, which is for GPUs over NCCL; give one of them"
        )
    known: set[tuple[int, int]] = set()
    for link in cluster.links:
        check_link(cluster, link)
        if (link.source, link.target) in known:
            raise BadInput(
                f"cluster '{cluster.name}': link {link.source} -> {link.target} is given twice; "
                f"leave one of them out"
            )
        known.add((link.source, link.target))
    check_connected(cluster, known)


def check_host(cluster: Cluster, host: Host) -> None:
    """Raise for a device, a rate or a latency out of range."""
    where = f"cluster '{cluster.name}', host '{host.name}'"
    for device in host.devices:
        check_device(where, device)
    check_figures(where, host, "link_bytes_per_s", "port_bytes_per_s", finite=False)
    latencies = ("link_latency_s", "port_latency_s")
    check_figures(where, host, *latencies, "price_per_hour", "memory_bytes", "full_speed_devices")


def check_figures(where: str, thing: object, *figures: str, finite: bool = True) -> None:
    """Raise for a figure of a thing that is negative or no number, or not finite."""
    for figure in figures:
        value: float = getattr(thing, figure)
        if not value >= 0 or (finite and value == float("inf")):
            needed = "finite number" if finite else "number"
            raise BadInput(f"{where}: {figure} is {value}; give a {needed} >= 0")


def check_device(where: str, device: Device) -> None:
    """Raise for a memory, a speed or a rate out of range."""
    if not (device.memory_bytes > 0 and 0 < device.speed < float("inf")):
        raise BadInput(
            f"{where}: device '{device.kind}' has memory {device.memory_bytes} B and speed "
            f"{device.speed}; both must be > 0"
        )
    if device.concurrent_passes and not device.overlaps_communication:
        raise BadInput(
            f"{where}: device '{device.kind}' has concurrent_passes, but overlaps_communication is "
            f"false: what works on two passes at once also transfers meanwhile; give one of them"
        )
    own, rates = f"{where}: device '{device.kind}'", ("off_chip_bytes_per_s", "message_bytes_per_s")
    check_figures(own, device, "on_chip_bytes", *rates, finite=False)
    check_figures(own, device, "message_s", "peak_flops_per_s")
    if device.on_chip_bytes and not device.off_chip_bytes_per_s:
        raise BadInput(
            f"{where}: device '{device.kind}' has on_chip_bytes {device.on_chip_bytes} but no "
            f"off_chip_bytes_per_s; give the rate of the memory beyond, or leave both out"
        )


def check_link(cluster: Cluster, link: Link) -> None:
    """Raise for a link that does not join two different devices, or with a number out of range."""
    where = f"cluster '{cluster.name}': link {link.source} -> {link.target}"
    last = len(cluster.devices) - 1
    if not all(0 <= end <= last for end in (link.source, link.target)):
        raise BadInput(f"{where} must join devices 0..{last}")
    if link.source == link.target:
        raise BadInput(f"{where} joins a device with itself; name two devices")
    if not link.bytes_per_s > 0:
        raise BadInput(
            f"{where} has rate {link.bytes_per_s} B/s; give a rate > 0, or leave the link out "
            f"where its hosts' own rates hold"
        )
    check_figures(where, link, "latency_s")


def unknown_memory_words(cluster: Cluster) -> str:
    """That the memory of hosts of accelerators is not known; empty where it is.

    The memory of CPU workers is that of their host.
    """
    names = [h.name for h in cluster.hosts if not h.memory_bytes and h.devices[0].kind != "cpu"]
    if not names:
        return ""
    return f"host memory unknown: [[hosts]] '{names[0]}' of '{cluster.name}' has no key memory"


def check_connected(cluster: Cluster, links: set[tuple[int, int]]) -> None:
    """Raise for the first pair of devices that cannot send to each other."""
    stop, count = 0, len(cluster.devices)
    for host in cluster.hosts:
        start, stop = stop, stop + len(host.devices)
        members = range(start, stop)
        pairs: dict[str, Iterator[tuple[int, int]]] = {}
        if not host.link_bytes_per_s:
            pairs["link_bytes_per_s"] = permutations(members, 2)
        if not host.port_bytes_per_s:
            ways = product(members, chain(range(start), range(stop, count)))
            pairs["port_bytes_per_s"] = (pair for i, j in ways for pair in ((i, j), (j, i)))
        for figure, needed in pairs.items():
            for source, target in needed:
                if (source, target) not in links:
                    raise BadInput(
                        f"cluster '{cluster.name}': device {source} cannot reach device {target}: "
                        f"{figure} of host '{host.name}' is {getattr(host, figure)} and there is "
                        f"no link {source} -> {target}; give a rate > 0 or add the link"
                    )


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


SAY_NOTHING = re.compile(r"nvidia|tesla|geforce|amd|instinct|oam|sxm\d?|hbm\de?")
"""Words that distinguish no models; a device whose name lacks them counts as on a module."""


def model_and_memory(kind: str) -> tuple[frozenset[str], str]:
    """The words that name a model, and its memory, empty where the name does not say it.

    >>> model_and_memory("NVIDIA A100-SXM4-80GB") == model_and_memory("A100-80GB")
    True
    >>> model_and_memory("NVIDIA GeForce RTX 4090")
    (frozenset({'rtx4090'}), '')
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"\brtx (?=\d)", "rtx", kind.lower()))
    memory = next((word for word in words if re.fullmatch(r"\d+gb", word)), "")
    model = frozenset(word for word in words if not SAY_NOTHING.fullmatch(word))
    return model - {memory}, memory


def may_be(kind: str, own: str, *, exactly: bool = False) -> bool:
    """Return whether two names of devices may be those of one kind.

    One may name the model with more words than the other, unless ``exactly``; and the memory.
    """
    (model, memory), (own_model, own_memory) = map(model_and_memory, (kind, own))
    longer = not exactly and (own_model < model or model < own_model)
    return (model == own_model or longer) and (not (memory and own_memory) or memory == own_memory)
