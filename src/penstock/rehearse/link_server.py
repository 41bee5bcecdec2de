"""Tells the ranks of a rehearsal when messages arrive and sums end.

A thread of the launcher hears of every message and every sum from the ranks that take part, plays
them on the emulated links, and answers as soon as a transfer has begun: its end is known then.
Lines of JSON over a local socket go both ways.

    rank  ->  ["rank", 3]
    rank  ->  ["message", source, target, bytes, tensors, [stage, stage, micro-batch], ready]
    rank  ->  ["sum", key, members, bytes, stage, ready]
    rank  <-  ["message", source, end]          to the target
    rank  <-  ["sum", key, end]                 to every member
"""

import asyncio
import json
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.cluster.cluster import Cluster
from penstock.errors import RunFailed, Stalled
from penstock.rehearse.emulated_links import (
    EmulatedLinks,
    LinkTransfer,
    Started,
    message_between,
    sum_among,
)
from penstock.runtime.transport.messages import Message


@dataclass
class LinkServer:
    """The state of the thread. ``begun`` are all transfers so far, in the order of their starts."""

    cluster: Cluster
    time_scale: float
    links: EmulatedLinks = field(default_factory=EmulatedLinks)
    begun: list[Started] = field(default_factory=list[Started])
    _ranks: dict[int, asyncio.StreamWriter] = field(default_factory=dict[int, asyncio.StreamWriter])
    _ready: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    _timer: asyncio.TimerHandle | None = None

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what one rank says, until it ends."""
        cluster, scale = self.cluster, self.time_scale
        try:
            while line := await reader.readline():
                match json.loads(line):
                    case ["rank", rank]:
                        self._ranks[rank] = writer
                    case ["message", source, target, size_bytes, tensors, [a, b, m], ready_s]:
                        ends, label = (source, target), (a, b, m)
                        self.offer(
                            message_between(cluster, ends, size_bytes, tensors, label, scale),
                            ready_s,
                        )
                    case ["sum", key, members, size_bytes, stage, ready_s]:
                        self._hand_in(key, members, size_bytes, stage, ready_s)
                    case _:
                        pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

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


MOST_AT_ONCE = 1 << 16
"""Bytes that are read from the server at once."""


class LinkClient:
    """This rank's connection to the `LinkServer`; an answer may take ``limit_s``.

    ``waits`` is how often this rank slept, and ``late_s`` how late it woke up in all: a machine
    that is too busy shows there.
    """

    def __init__(self, name: str, rank: int, limit_s: float) -> None:
        self.waits, self.late_s = 0, 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(f"\0{name}")
        self._limit_s, self._unread = limit_s, b""
        self._messages: dict[int, deque[float]] = {}
        self._sums: dict[str, deque[float]] = {}
        self._say(["rank", rank])

    def message(self, message: Message, size_bytes: float, tensors: int) -> None:
        """A message is ready to be sent."""
        ends = message.sender, message.receiver
        label = message.sender_stage, message.receiver_stage, message.micro_batch
        self._say(["message", *ends, size_bytes, tensors, label, time.perf_counter()])

    def sum(self, key: str, members: Sequence[int], size_bytes: float, stage: int) -> None:
        """This rank's gradients of a bucket are complete."""
        self._say(["sum", key, members, size_bytes, stage, time.perf_counter()])

    def end_of_message(self, source: int) -> float:
        """When the next message of ``source`` has arrived."""
        return self._next(self._messages, source, f"a message of rank {source}")

    def end_of_sum(self, key: str) -> float:
        """When the sum ``key`` is complete."""
        return self._next(self._sums, key, f"the sum {key}")

    def sleep_until(self, end_s: float) -> float:
        """Sleep until ``end_s`` of `time.perf_counter`, and return it."""
        left_s = end_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
            self.waits += 1
            self.late_s += time.perf_counter() - end_s
        return end_s

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def _say(self, words: list[object]) -> None:
        try:
            self._socket.sendall(json.dumps(words).encode() + b"\n")
        except OSError as cause:
            raise RunFailed("the rehearsal's links have ended before this rank") from cause

    def _next(self, ends: dict, wanted: int | str, what: str) -> float:  # type: ignore[type-arg]
        while not (known := ends.get(wanted)):
            if not self._receive(self._limit_s):
                raise Stalled(f"{what} did not begin on the emulated links in time")
        return known.popleft()

    def _receive(self, within_s: float) -> bool:
        """Take in what the server says, if it says something within these seconds."""
        if not select.select([self._socket], [], [], within_s)[0]:
            return False
        data = self._socket.recv(MOST_AT_ONCE)
        if not data:
            raise RunFailed("the rehearsal's links have ended before this rank")
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            match json.loads(line):
                case ["message", source, end_s]:
                    self._messages.setdefault(source, deque()).append(end_s)
                case ["sum", key, end_s]:
                    self._sums.setdefault(key, deque()).append(end_s)
                case _:
                    pass
        return True
