"""Clusters as TOML, with units as people write them.

    name = "two hosts"

    [[hosts]]
    name = "a"
    link_bandwidth = "130 GB/s"
    port_bandwidth = "25 Gb/s"
    port_latency = "30 us"

    [[hosts.devices]]
    kind = "V100-16GB"
    memory = "16 GB"
    count = 8

A host or device with a ``count`` represents that many equal ones. Numbers without a unit are SI:
bytes, bytes per second, seconds.
"""

import json
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from decimal import Decimal
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.errors import BadInput
from penstock.files import (
    Entry,
    check_document,
    in_one_line,
    parse_toml,
    read_text,
    write_text,
)

Dimension: TypeAlias = Literal["memory", "bandwidth", "time"]

PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BINARY_PREFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
BYTES = {f"{prefix}B": scale for prefix, scale in (PREFIXES | BINARY_PREFIXES).items()}
BITS = {f"{prefix}b": scale / 8 for prefix, scale in PREFIXES.items()}

UNITS: dict[Dimension, dict[str, float]] = {
    "memory": BYTES,
    "bandwidth": {f"{unit}/s": scale for unit, scale in (BYTES | BITS).items()},
    "time": {"s": 1, "ms": 1e-3, "us": 1e-6, "\N{MICRO SIGN}s": 1e-6, "ns": 1e-9},
}


def parse_quantity(text: str, dimension: Dimension) -> float:
    """A number with a unit, converted to bytes, bytes per second or seconds.

    >>> parse_quantity("25 Gb/s", "bandwidth")
    3125000000.0
    >>> parse_quantity("16GB", "memory")
    16000000000.0
    """
    # Nothing is given back: a text that does not match would otherwise take its length squared.
    match = re.fullmatch(r"\s*+([-+]?[\d.]++(?:[eE][-+]?\d++)?)\s*+(\S*+)\s*+", text)
    units = UNITS[dimension]
    if not match:
        raise ValueError(f"write a number and a unit, one of {', '.join(units)}")
    figure, unit = match.groups()
    if unit not in units:
        raise ValueError(f"unknown unit '{unit}'; use one of {', '.join(units)}")
    try:
        # Decimal arithmetic, so that "5 us" gives exactly the float 5e-6.
        return float(Decimal(figure) * Decimal(str(units[unit])))
    except ArithmeticError:
        raise ValueError(f"'{figure}' is not a number that a computer holds") from None


def in_si(dimension: Dimension) -> BeforeValidator:
    """Converts a string with a unit to the SI number, and leaves numbers unchanged."""

    def convert(value: object) -> object:
        return parse_quantity(value, dimension) if isinstance(value, str) else value

    return BeforeValidator(convert)


Bytes = Annotated[float, in_si("memory")]
BytesPerSecond = Annotated[float, in_si("bandwidth")]
Seconds = Annotated[float, in_si("time")]
MOST_DEVICES = 65536
Count = Annotated[int, Field(ge=1, le=MOST_DEVICES)]


class DeviceEntry(Entry):
    """Equal devices of a host."""

    kind: str
    memory: Bytes
    speed: float = 1.0
    overlaps_communication: bool = True
    concurrent_passes: bool = False
    on_chip_memory: Bytes = 0.0
    off_chip_bandwidth: BytesPerSecond = 0.0
    message_time: Seconds = 0.0
    message_bandwidth: BytesPerSecond = 0.0
    peak_flops: float = 0.0
    count: Count = 1


class HostEntry(Entry):
    """Equal hosts."""

    name: str
    devices: list[DeviceEntry]
    link_bandwidth: BytesPerSecond = 0.0
    link_latency: Seconds = 0.0
    port_bandwidth: BytesPerSecond = 0.0
    port_latency: Seconds = 0.0
    full_speed_devices: int = 0
    half_duplex: bool = False
    separate_links: bool = False
    price_per_hour: float = 0.0
    memory: Bytes = 0.0
    count: Count = 1


class LinkEntry(Entry):
    """A link from one device (numbered through all hosts from 0) to another."""

    source: int
    target: int
    bandwidth: BytesPerSecond
    latency: Seconds = 0.0


Messages: TypeAlias = Literal["as ready", "in order"]
"""The next message of a device: whichever was ready first, or the next one planned."""


class ClusterEntry(Entry):
    """A whole cluster."""

    name: str
    hosts: list[HostEntry]
    links: list[LinkEntry] = Field(default_factory=list[LinkEntry])
    messages: Messages = "as ready"
    sum_step: Seconds = 0.0


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a TOML file.

    Raises:
        BadInput: no such file, a syntax error, an unknown key or unit, or a number out of range.
    """
    return cluster_from_toml(read_text(path, "cluster"), path)


def cluster_from_toml(text: str, path: str | Path) -> Cluster:
    """The cluster in a TOML text; ``path`` is used in error messages."""
    entry = check_document(ClusterEntry, parse_toml(text, path, "cluster"), path)
    devices = sum(host.count * sum(device.count for device in host.devices) for host in entry.hosts)
    if devices > MOST_DEVICES:
        raise BadInput(f"{path}: the cluster has {devices} devices; at most {MOST_DEVICES} can be")
    with in_one_line(f"{path}: "), in_keys():
        hosts = tuple(h for host in entry.hosts for h in hosts_of_entry(host))
        links = tuple(Link(**fields_of(link)) for link in entry.links)
        in_order = entry.messages == "in order"
        return Cluster(entry.name, hosts, links, in_order, entry.sum_step)


def hosts_of_entry(entry: HostEntry) -> list[Host]:
    """The hosts that an entry represents; several ones get numbered names."""
    equal = [(Device(**fields_of(device)), device.count) for device in entry.devices]
    devices = tuple(device for device, count in equal for _ in range(count))
    names = [entry.name] if entry.count == 1 else [f"{entry.name}{i}" for i in range(entry.count)]
    return [Host(**fields_of(entry, name=name, devices=devices)) for name in names]


FIELDS = {
    "memory": "memory_bytes",
    "on_chip_memory": "on_chip_bytes",
    "off_chip_bandwidth": "off_chip_bytes_per_s",
    "message_time": "message_s",
    "message_bandwidth": "message_bytes_per_s",
    "peak_flops": "peak_flops_per_s",
    "link_bandwidth": "link_bytes_per_s",
    "link_latency": "link_latency_s",
    "port_bandwidth": "port_bytes_per_s",
    "port_latency": "port_latency_s",
    "bandwidth": "bytes_per_s",
    "latency": "latency_s",
}
"""The fields that have another name than their keys, which go without units."""


@contextmanager
def in_keys() -> Generator[None]:
    """Replace fields by keys of the file in the errors of the block."""
    try:
        yield
    except BadInput as error:
        keys = {field: key for key, field in FIELDS.items()}
        words = re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), str(error))
        raise BadInput(words) from None


def fields_of(entry: Entry, **others: object) -> dict[str, Any]:
    """The fields of a device, a host or a link that an entry gives, with some replaced."""
    fields = {FIELDS.get(key, key): value for key, value in entry if key != "count"}
    return fields | others


def entry_values(thing: Device | Host | Link, entry: type[Entry]) -> dict[str, str | float]:
    """The keys of an entry that gives the fields of a device, a host or a link."""
    keys = (key for key in entry.model_fields if key not in ("count", "devices"))
    return {key: getattr(thing, FIELDS.get(key, key)) for key in keys}


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write ``cluster`` in SI numbers; `read_cluster` restores it exactly.

    Raises:
        BadInput: the file cannot be written.
    """
    write_text(path, cluster_text(cluster))


def cluster_text(cluster: Cluster) -> str:
    """``cluster`` as TOML, in SI numbers."""
    messages = "in order" if cluster.messages_in_order else "as ready"
    blocks = [
        toml_table("", {"name": cluster.name, "messages": messages, "sum_step": cluster.sum_step_s})
    ]
    for host in cluster.hosts:
        blocks.append(toml_table("[[hosts]]", entry_values(host, HostEntry)))
        for device, equal in groupby(host.devices):
            values = entry_values(device, DeviceEntry)
            values["memory"] = device.memory_bytes + device.reserved_bytes
            blocks.append(toml_table("[[hosts.devices]]", values | {"count": len(list(equal))}))
    blocks += (toml_table("[[links]]", entry_values(link, LinkEntry)) for link in cluster.links)
    return "\n".join(blocks)


def toml_table(head: str, entries: dict[str, str | float]) -> str:
    """One TOML table as text."""
    # JSON strings and booleans are valid TOML, except for DEL, which TOML requires to be escaped.
    values = {
        key: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        if isinstance(value, str | bool)
        else repr(value)
        for key, value in entries.items()
    }
    lines = [head] * bool(head) + [f"{key} = {value}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


LOOPBACK_BYTES_PER_S = 2e9
LOOPBACK_LATENCY_S = 100e-6


def local_cluster(workers: int, cores: int, memory_bytes: float) -> Cluster:
    """``workers`` processes of this machine, which share its cores and communicate over loopback.

    ``memory_bytes`` is for all workers together; each gets an equal share. The link numbers are
    for Gloo over loopback on an ordinary server; measure your own for better predictions.
    """
    if workers < 1 or cores < 1 or not memory_bytes > 0:
        raise BadInput(
            f"{workers} local workers on {cores} cores with {memory_bytes} B of memory: all three "
            f"must be > 0"
        )
    host = Host(
        name="localhost",
        devices=(Device("cpu", memory_bytes / workers),) * workers,
        link_bytes_per_s=LOOPBACK_BYTES_PER_S,
        link_latency_s=LOOPBACK_LATENCY_S,
        full_speed_devices=cores if cores < workers else 0,
    )
    return Cluster(f"local-{workers}", (host,))


PRESETS = Path(__file__).parent / "presets"

CLUSTERS: dict[str, Callable[[], Cluster]] = {
    path.stem: partial(read_cluster, path)
    for path in sorted(PRESETS.glob("*.toml"), key=lambda path: path.stem)
}
"""The clusters that come with the package; comments in their TOML files name the sources."""


def find_cluster(name_or_path: str | Path) -> Cluster:
    """The preset of this name, or the cluster in the TOML file at this path.

    Raises:
        BadInput: neither a preset nor a file, or the file does not describe a cluster.
    """
    if preset := CLUSTERS.get(str(name_or_path)):
        return preset()
    if not os.path.exists(name_or_path):
        near = get_close_matches(str(name_or_path).lower(), CLUSTERS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "use one of them"
        raise BadInput(
            f"cluster '{name_or_path}' is neither a preset ({', '.join(CLUSTERS)}) nor an "
            f"existing TOML file; {hint}"
        )
    return read_cluster(name_or_path)
