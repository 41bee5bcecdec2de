"""What may go wrong in a rehearsal: a device or the links are slow, or a rank is killed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cluster.cluster import Cluster
from penstock.cluster.what_if import (
    DeviceChange,
    NumberChange,
    read_bandwidth_change,
    read_device_change,
    with_device_change,
    with_link_bandwidth,
)
from penstock.errors import BadInput

__all__ = ["Fault", "read_fault", "with_faults"]

FORM = re.compile(r"\s*(kill|slow|links)\s+(.+)", re.DOTALL)
FORMS = "'kill 3', 'slow 3 20 %' or 'links x0.5'"
MOST_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Fault:
    """One of three: the rank that is killed (-1: none), a device's change, or the links'."""

    words: str
    killed_rank: int = -1
    device: DeviceChange | None = None
    links: NumberChange | None = None


def read_fault(text: str) -> Fault:
    """Parse a fault.

    >>> read_fault("slow 3 20 %").device
    DeviceChange(device=3, direction='slower', part=0.2)
    >>> read_fault("kill 2").killed_rank
    2

    Raises:
        BadInput: the text has another form.
    """
    match = FORM.fullmatch(text)
    if match is None:
        raise BadInput(f"fault '{text}' cannot be read; write {FORMS}")
    kind, rest = match[1], match[2].strip()
    if kind == "links":
        return Fault(text, links=read_bandwidth_change(rest))
    if kind == "kill":
        if not (rest.isascii() and rest.isdigit() and len(rest) <= MOST_DIGITS):
            raise BadInput(f"fault '{text}' cannot be read: '{rest}' is no rank; write {FORMS}")
        return Fault(text, killed_rank=int(rest))
    device, _, part = rest.partition(" ")
    return Fault(text, device=read_device_change(f"{device} slower {part}"))


def with_faults(cluster: Cluster, faults: Sequence[Fault]) -> Cluster:
    """The cluster with its slow devices and links.

    Raises:
        BadInput: there is no such device.
    """
    for fault in faults:
        if fault.device is not None:
            cluster = with_device_change(cluster, fault.device)
        if fault.links is not None:
            cluster = with_link_bandwidth(cluster, fault.links)
    return cluster
