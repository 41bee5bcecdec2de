"""What happened when, on every device: predicted and measured runs have the same form."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Event", "EventKind", "MemorySample", "Timeline"]

EventKind: TypeAlias = Literal["F", "B", "I", "W", "R", "SEND", "RECV", "REDUCE", "STEP"]
"""Compute actions, messages seen from their sender and receiver, gradient all-reduce, optimizer."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that occupied a device (or one of its communication engines) for a while.

    ``device`` is the index in the cluster, equal to the rank of a run. ``micro_batch`` is -1 where
    an event belongs to none (REDUCE, STEP). ``peer`` is the other device of a message, -1 else.
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
    """Bytes in use on a device from ``time_s`` on, until its next sample."""

    device: int
    time_s: float
    bytes: float


@dataclass(frozen=True)
class Timeline:
    """One iteration: events sorted by start, from time 0; and memory over time.

    It does not know whether it was predicted or measured; ``title`` is for people.
    """

    events: tuple[Event, ...]
    devices: int
    memory: tuple[MemorySample, ...] = ()
    title: str = ""
