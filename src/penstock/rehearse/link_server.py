"""Report to the ranks of a rehearsal when messages arrive and sums end.

A thread of the launcher receives every transfer from the ranks that send it, plays it on the
emulated links, and replies as soon as it has begun: its end is known then. Lines of JSON over a
local socket go both ways.

    rank  ->  3                         its number, first
    rank  ->  [transfer, ready]         from the sender of a message, from every member of a sum
    rank  <-  [key, end]                to the receiver of a message, to every member of a sum
"""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.errors import RunFailed, Stalled
from penstock.rehearse.emulated_links import EmulatedLinks, LinkTransfer, Started


class LinkServer:
    """The state of the thread. ``begun`` are all transfers so far, in the order of their starts."""

    def __init__(self) -> None:
        self.links = EmulatedLinks()
        self.begun: list[Started] = []
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._ready = defaultdict[str, list[float]](list)
        self._timer: asyncio.TimerHandle | None = None

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive the transfers of one rank, until it ends."""
        try:
            self._ranks[int(await reader.readline())] = writer
            while line := await reader.readline():
                fields, ready_s = json.loads(line)
                transfer = LinkTransfer(*fields)
                ready = self._ready[transfer.key]
                ready.append(ready_s)
                # A sum can begin with the last member's gradients.
                if len(ready) >= len(transfer.members):
                    del self._ready[transfer.key]
                    self.offer(transfer, max(ready))
        except (ConnectionError, ValueError, asyncio.CancelledError):
            pass  # the rank, or the rehearsal, has ended within a line
        finally:
            writer.close()

    def offer(self, transfer: LinkTransfer, ready_s: float) -> None:
        """Add a transfer that can begin since ``ready_s``; report what begins to its receivers."""
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
        self.begun += begun
        for started in begun:
            transfer = started.transfer
            line = json.dumps([transfer.key, started.end_s]).encode() + b"\n"
            for rank in transfer.receivers:
                writer = self._ranks.get(rank)
                if writer is not None and not writer.is_closing():
                    writer.write(line)


@contextmanager
def serve_links(server: LinkServer) -> Iterator[str]:
    """Run the server in a thread during the block; the name of its socket (no file; Linux)."""
    name = f"penstock-links-{secrets.token_hex(8)}"
    listens, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        listener = await asyncio.start_unix_server(server.hear, path=f"\0{name}")
        listens.set()
        await asyncio.to_thread(ended.wait)
        listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name=name, daemon=True)
    thread.start()
    listens.wait(10)
    try:
        yield name
    finally:
        ended.set()
        thread.join(5)


class LinkClient:
    """This rank's connection to the `LinkServer`; an answer may take ``limit_s``.

    ``waits`` is how often this rank slept, and ``late_s`` how late it woke up in all: a machine
    that is too busy shows there.
    """

    def __init__(self, name: str, rank: int, limit_s: float) -> None:
        self.waits, self.late_s = 0, 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(limit_s)
        self._socket.connect(f"\0{name}")
        self._answers = self._socket.makefile()
        self._ends = defaultdict[str, deque[float]](deque)
        self._say(rank)

    def offer(self, transfer: LinkTransfer) -> None:
        """A message, or this rank's part of a sum, is ready."""
        self._say([transfer, time.perf_counter()])

    def wait_for(self, key: str) -> None:
        """Wait until the transfer ``key`` has ended on the emulated links."""
        while not (ends := self._ends[key]):
            try:
                line = self._answers.readline()
            except TimeoutError as cause:
                raise Stalled(f"{key} did not begin on the emulated links in time") from cause
            if not line:
                raise RunFailed("the rehearsal's links have ended before this rank")
            begun, end_s = json.loads(line)
            self._ends[begun].append(end_s)
        self.sleep_until(ends.popleft())

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
        self._answers.close()
        self._socket.close()

    def _say(self, words: object) -> None:
        try:
            self._socket.sendall(json.dumps(words).encode() + b"\n")
        except OSError as cause:
            raise RunFailed("the rehearsal's links have ended before this rank") from cause
