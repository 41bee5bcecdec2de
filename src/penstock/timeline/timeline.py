"""The timeline of all devices; predicted and measured ones have the same form."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

EventKind: TypeAlias = Literal["F", "B", "I", "W", "R", "SEND", "RECV", "REDUCE", "STEP"]
"""Compute actions; messages on their sender and on their receiver; gradient all-reduce; optimizer
step."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that occupied a device, or one of its communication engines, for a while.

    ``device`` is the index in the cluster, which is also the rank. ``micro_batch`` is -1 for REDUCE
    and STEP. ``peer`` is the other device of a message, otherwise -1.
    """

    device: int
    kind: EventKind
    stage: int
    micro_batch: int
    start_s: float
    end_s: float
    peer: int = -1
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes in use on a device from ``time_s`` until its next sample."""

    device: int
    time_s: float
    bytes: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """One iteration, or several: events sorted by start, from time 0, and memory over time.

    Nothing here says whether it was predicted or measured, except the free text ``title``.
    """

    events: tuple[Event, ...]
    devices: int
    memory: tuple[MemorySample, ...] = ()
    title: str = ""

    def __repr__(self) -> str:
        return f"Timeline('{self.title}', {self.devices} devices, {len(self.events)} events)"
