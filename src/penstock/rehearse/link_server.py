"""Tells the ranks of a rehearsal when messages arrive, sums end, and shared cores have computed.

A thread of the launcher hears of every message and every sum from the ranks that take part, plays
them on the emulated links, and answers as soon as a transfer has begun: its end is known then.
Lines of JSON over a local socket go both ways.

    rank  ->  ["rank", 3]
    rank  ->  ["message", source, target, bytes, tensors, [stage, stage, micro-batch], ready]
    rank  ->  ["sum", key, members, bytes, stage, ready]
    rank  <-  ["message", source, end]          to the target
    rank  <-  ["sum", key, end]                 to every member
    rank  ->  ["compute", number, seconds, begin]
    rank  <-  ["compute", number, end]          again whenever another rank changes the end
"""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.cluster.cluster import Cluster
from penstock.rehearse.emulated_cores import EmulatedCores, shares_cores
from penstock.rehearse.emulated_links import (
    EmulatedLinks,
    LinkTransfer,
    Started,
    message_between,
    sum_among,
)

__all__ = ["LinkServer", "serve_links"]


@dataclass
class LinkServer:
    """The state of the thread. ``begun`` are all transfers so far, in the order of their starts.

    ``cores`` are those of each host whose devices share them.
    """

    cluster: Cluster
    time_scale: float
    links: EmulatedLinks = field(default_factory=EmulatedLinks)
    begun: list[Started] = field(default_factory=list[Started])
    _ranks: dict[int, asyncio.StreamWriter] = field(default_factory=dict[int, asyncio.StreamWriter])
    _ready: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    _timer: asyncio.TimerHandle | None = None
    cores: dict[int, EmulatedCores] = field(default_factory=dict[int, EmulatedCores])
    _computing: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])

    def __post_init__(self) -> None:
        for index, host in enumerate(self.cluster.hosts):
            if shares_cores(host):
                self.cores[index] = EmulatedCores(host.full_speed_devices)

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what one rank says, until it ends."""
        own = -1
        try:
            while line := await reader.readline():
                match json.loads(line):
                    case ["rank", rank]:
                        own, self._ranks[rank] = rank, writer
                    case ["message", source, target, size_bytes, tensors, label, ready_s]:
                        ends, named = (source, target), (label[0], label[1], label[2])
                        scale = self.time_scale
                        self.offer(
                            message_between(self.cluster, ends, size_bytes, tensors, named, scale),
                            ready_s,
                        )
                    case ["sum", key, members, size_bytes, stage, ready_s]:
                        self._hand_in(key, members, size_bytes, stage, ready_s)
                    case ["compute", number, seconds, begin_s]:
                        self._compute(own, number, seconds, begin_s)
                    case _:
                        pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _compute(self, rank: int, number: int, seconds: float, begin_s: float) -> None:
        """A rank computes; those that share its cores may end at another moment now."""
        cores = self.cores[self.cluster.host_index[rank]]
        self._computing[rank] = number, -1.0
        for other, end_s in cores.begin(rank, seconds, begin_s).items():
            current, told_s = self._computing[other]
            if end_s != told_s:
                self._computing[other] = current, end_s
                self._say(other, ["compute", current, end_s])

    def _hand_in(
        self, key: str, members: Sequence[int], size_bytes: float, stage: int, ready_s: float
    ) -> None:
        """One member's gradients are complete; the sum can begin with the last member's."""
        ready = self._ready.setdefault(key, [])
        ready.append(ready_s)
        if len(ready) == len(members):
            del self._ready[key]
            transfer = sum_among(self.cluster, members, size_bytes, stage, key, self.time_scale)
            self.offer(transfer, max(ready))

    def offer(self, transfer: LinkTransfer, ready_s: float) -> None:
        """A transfer can begin since ``ready_s``; those concerned hear of what begins."""
        self._tell(self.links.offer(transfer, ready_s))
        self._go_on()

    def _go_on(self) -> None:
        """Advance to now, and again when the next transfer ends."""
        self._tell(self.links.advance(time.perf_counter()))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (end_s := self.links.next_end_s) < float("inf"):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, end_s - time.perf_counter()), self._go_on)

    def _tell(self, begun: Sequence[Started]) -> None:
        for started in begun:
            self.begun.append(started)
            transfer = started.transfer
            if transfer.members:
                for member in transfer.members:
                    self._say(member, ["sum", transfer.key, started.end_s])
            else:
                self._say(transfer.target, ["message", transfer.source, started.end_s])

    def _say(self, rank: int, words: list[Any]) -> None:
        writer = self._ranks.get(rank)
        if writer is not None and not writer.is_closing():
            writer.write(json.dumps(words).encode() + b"\n")


@contextmanager
def serve_links(server: LinkServer) -> Iterator[str]:
    """Within, the server runs in a thread; the name of its socket (without a file; Linux)."""
    name = f"penstock-links-{secrets.token_hex(8)}"
    loop = asyncio.new_event_loop()
    listening = threading.Event()

    async def serve() -> None:
        async with await asyncio.start_unix_server(server.hear, path=f"\0{name}"):
            listening.set()
            await asyncio.Event().wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        task = loop.create_task(serve())
        loop.run_forever()
        # Then the ranks' readers, and the server, end.
        for each in [task, *asyncio.all_tasks(loop)]:
            each.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run, name="penstock-links", daemon=True)
    thread.start()
    listening.wait(10)
    try:
        yield name
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
