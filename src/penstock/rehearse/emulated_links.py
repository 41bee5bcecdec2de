"""The links of a cluster in real time: which transfer runs when.

A transfer occupies all that it uses at once. A message between two devices uses the sender's send
engine and the receiver's receive engine. Between hosts without a link of their own it also uses
both ports. The sum of a gradient bucket uses both engines of its members, and the ports between
their hosts. Of those that wait, messages go before sums, and then the one that was ready first. One
that cannot start holds up no other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, permutations
from math import inf
from typing import NamedTuple

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_s, message_resources

PORTS = "port out", "port in"

BOTH_WAYS = {"receive": "send", "port in": "port out"}
"""Engines and ports that serve the other direction, too, where both take turns."""


class LinkTransfer(NamedTuple):
    """A message from ``source`` to ``target``, or a sum among ``members``.

    ``key`` is unique among those of an iteration that a rank waits for. ``label`` are the stages
    that send and receive it, and the micro-batch (-1: a sum). ``bytes`` are those of the plan,
    which the tensors here may be smaller than. Of the ``parts`` of the links that it occupies, each
    serves one transfer at a time.
    """

    key: str
    source: int
    target: int
    seconds: float
    bytes: float
    parts: Sequence[str]
    label: Sequence[int]
    members: Sequence[int] = ()

    @property
    def receivers(self) -> Sequence[int]:
        """The ranks that wait for its end."""
        return self.members or (self.target,)


@dataclass(frozen=True, slots=True)
class Started:
    """A transfer with the moments at which it was ready, began and ends."""

    transfer: LinkTransfer
    ready_s: float
    start_s: float
    end_s: float


class EmulatedLinks:
    """The transfers that wait or run. All moments are seconds of one clock."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bool, float, int, LinkTransfer]] = []
        self._running: list[tuple[float, int, LinkTransfer]] = []
        self._busy = set[str]()
        self._free_since_s: dict[str, float] = {}
        self._numbers = count()

    def offer(self, transfer: LinkTransfer, ready_s: float) -> list[Started]:
        """A transfer that is ready since ``ready_s``; returns what starts because of it."""
        begun = self.advance(ready_s)
        self._waiting.append((bool(transfer.members), ready_s, next(self._numbers), transfer))
        return begun + self._start_waiting()

    def advance(self, now_s: float) -> list[Started]:
        """End what ends until ``now_s``; returns what starts because of it."""
        begun: list[Started] = []
        while self._running and self._running[0][0] <= now_s:
            end_s, _, transfer = heappop(self._running)
            for part in transfer.parts:
                self._busy.remove(part)
                self._free_since_s[part] = end_s
            begun += self._start_waiting()
        return begun

    @property
    def next_end_s(self) -> float:
        """The moment at which the next transfer ends; infinite if none runs."""
        return self._running[0][0] if self._running else inf

    def _start_waiting(self) -> list[Started]:
        """Start what can start.

        A transfer starts when it was ready and the last of its parts became free. That moment may
        be a little in the past, because messages about it take time.
        """
        begun: list[Started] = []
        kept: list[tuple[bool, float, int, LinkTransfer]] = []
        for entry in sorted(self._waiting):
            _, ready_s, number, transfer = entry
            if not self._busy.isdisjoint(transfer.parts):
                kept.append(entry)
                continue
            free_s = (self._free_since_s.get(part, -inf) for part in transfer.parts)
            start_s = max(ready_s, *free_s) if transfer.parts else ready_s
            self._busy.update(transfer.parts)
            heappush(self._running, (start_s + transfer.seconds, number, transfer))
            begun.append(Started(transfer, ready_s, start_s, start_s + transfer.seconds))
        self._waiting = kept
        return begun


def message_between(
    cluster: Cluster,
    ends: tuple[int, int],
    size_bytes: float,
    tensors: int,
    label: tuple[int, int, int],
    key: str,
    time_scale: float,
) -> LinkTransfer:
    """A message of some tensors, each of which has the latency of the link."""
    seconds = 0.0
    if size_bytes > 0:
        sent_s = size_bytes / cluster.bandwidth(*ends)
        seconds = (tensors * cluster.latency(*ends) + sent_s) * time_scale
    return LinkTransfer(key, *ends, seconds, size_bytes, [*parts_of_links(cluster, *ends)], label)


def sum_among(
    cluster: Cluster,
    members: tuple[int, ...],
    size_bytes: float,
    stage: int,
    key: str,
    time_scale: float,
) -> LinkTransfer:
    """The sum of a gradient bucket over its holders."""
    seconds = all_reduce_s(cluster, members, size_bytes) * time_scale
    label = stage, stage, -1
    used = parts_of_sum(cluster, members)
    return LinkTransfer(key, -1, -1, seconds, size_bytes, used, label, members)


@lru_cache(64)
def parts_of_sum(cluster: Cluster, members: tuple[int, ...]) -> tuple[str, ...]:
    """The parts of links that a sum occupies, the same for all buckets of its members."""
    pairs = permutations(members, 2)
    return tuple({part for ends in pairs for part in engines_and_ports(cluster, *ends)})


def parts_of_links(cluster: Cluster, source: int, target: int) -> Iterator[str]:
    """The parts of links that a message between two devices occupies."""
    hosts = cluster.host_index
    host = cluster.hosts[hosts[source]]
    if hosts[source] == hosts[target] and host.separate_links:
        one, other = sorted((source, target)) if host.half_duplex else (source, target)
        yield f"link {one} {other}"
    else:
        yield from engines_and_ports(cluster, source, target)


def engines_and_ports(cluster: Cluster, source: int, target: int) -> Iterator[str]:
    """Engines and ports; one serves both directions where these take turns."""
    for kind, number in message_resources(cluster, source, target):
        host = number if kind in PORTS else cluster.host_index[number]
        half_duplex = cluster.hosts[host].half_duplex
        yield f"{BOTH_WAYS.get(kind, kind) if half_duplex else kind} {number}"
