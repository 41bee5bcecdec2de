"""Memory that the ranks of one host share, and the pipes by which they wake one another.

Every rank owns one anonymous segment (``memfd``) and one pipe. Its peers open both through
``/proc/<pid>/fd``. Neither has a name in a file system, so nothing is left behind, however a
process ends. A segment begins with words that only its owner writes (see `Word`). They are followed
by one ring for each rank that sends to the owner.
"""

import ctypes
import mmap
import os
import select
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

from penstock.errors import Stalled
from penstock.runtime.processes.failures import PeerFailed, PeerVanished
from penstock.runtime.processes.watch import WATCH, CurrentWait

__all__ = [
    "HEADER_BYTES",
    "RingSize",
    "Segments",
    "SharedSegment",
    "Word",
    "own_core",
]

HEADER_BYTES = 4096
BANK_WORDS = 64
CACHE_LINE_BYTES = 64
SLICE_MS = 5
"""A sleeping rank checks this often, in milliseconds, in case a wake-up is lost in a race."""


LEAST_SPIN_S = 20e-6


class Word(IntEnum):
    """Indexes of the owner's words at the start of its segment, one cache line each."""

    ASLEEP = 0  # 1: waits for messages; 2: waits for messages or for free slots to send
    ABORTED = 8
    CLOSED = 16
    POSITION = 24  # the code of its current action
    CORE = 32  # the processor core it was last seen on
    BANKS = 64  # two banks of values for `announce`


@dataclass(frozen=True, slots=True)
class RingSize:
    """The number of slots of a ring and the bytes of each."""

    slots: int
    slot_bytes: int

    @property
    def bytes(self) -> int:
        """Including its two counters, each on its own cache line."""
        return 2 * CACHE_LINE_BYTES + self.slots * self.slot_bytes


@dataclass
class SharedSegment:
    """One rank's segment, mapped into this process.

    ``rings[sender]`` is the offset of a sender's ring, and its size.
    """

    memory: mmap.mmap
    rings: Mapping[int, tuple[int, RingSize]]
    bell: int
    process: int = -1
    words: memoryview = field(init=False)
    numbers: "memoryview[float]" = field(init=False)  # pyright: ignore[reportInvalidTypeArguments]

    def __post_init__(self) -> None:
        header = memoryview(self.memory)[:HEADER_BYTES]
        self.words = header.cast("Q")
        self.numbers = header.cast("d")

    def ring_bell(self) -> None:
        """Wake the owner. A full pipe means that it has already been woken.

        Its ASLEEP word is cleared first, so that later messages do not wake it again.
        """
        self.words[Word.ASLEEP] = 0
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.bell, b"!")

    def close_handles(self) -> None:
        """Close the handles; the memory is released when nothing refers to it any more."""
        for handle in (self.bell, self.process):
            if handle >= 0:
                os.close(handle)
        # The kernel gives the numbers to other files.
        self.bell = self.process = -1


class Segments:
    """The segments of all ranks, with functions that wait for changes in them."""

    def __init__(
        self,
        rank: int,
        segments: dict[int, SharedSegment],
        ear: int,
        timeout_s: float,
        spin_s: float,
    ) -> None:
        self.rank = rank
        self.own = segments[rank]
        self.peers = {peer: segment for peer, segment in segments.items() if peer != rank}
        self.all = segments
        self._ear = ear
        self._timeout_s = timeout_s
        self._spin_limit_s = self._spin_s = max(spin_s, LEAST_SPIN_S)
        self._exchanges = 0
        self._poll = select.poll()
        self._poll.register(ear, select.POLLIN)
        self._rank_of_process = {s.process: peer for peer, s in self.peers.items()}
        for process in self._rank_of_process:
            self._poll.register(process, select.POLLIN)

    def wait(
        self,
        ready: Callable[[], bool],
        what: Callable[[], str],
        peer: int = -1,
        advance: Callable[[], bool] | None = None,
        progress: Callable[[], object] | None = None,
    ) -> None:
        """Wait until ``ready()``, which ``peer`` causes; spins for a moment, then sleeps.

        ``advance`` sends this rank's own unsent messages and returns whether some are left. The
        time limit starts again whenever ``progress()`` has changed.

        Raises:
            Stalled: not ready within the time limit; ``what()`` describes what was waited for.
            RunFailed: a peer failed or its process ended meanwhile.
        """
        start = time.perf_counter()
        if self._spun_until(ready, peer, advance, start):
            return
        seen = progress() if progress is not None else None
        WATCH.wait = CurrentWait(what, peer, "", start)
        while not self._slept_until(ready, advance):
            self._check_peers(ready, what, peer)
            if progress is not None and progress() != seen:
                seen, start = progress(), time.perf_counter()
            if time.perf_counter() - start > self._timeout_s:
                raise Stalled(f"rank {self.rank} waited {self._timeout_s:g} s for {what()}")
            WATCH.check()
        WATCH.wait = None
        # After a short sleep, spinning would have been better; after a long one, spin less.
        paid = time.perf_counter() - start < self._spin_limit_s
        wanted = self._spin_s * 2 if paid else self._spin_s / 2
        self._spin_s = min(max(wanted, LEAST_SPIN_S), self._spin_limit_s)

    def _spun_until(
        self,
        ready: Callable[[], bool],
        peer: int,
        advance: Callable[[], bool] | None,
        start: float,
    ) -> bool:
        """Check repeatedly for a while: sleeping costs a late wake-up, on the core of the waker.

        Does not spin if the peer was last seen on this core, which it needs to continue.
        """
        words = self.all[peer].words if peer >= 0 else self.own.words
        while True:
            for _ in range(30):
                if ready():
                    return True
            if advance is not None:
                advance()
            if time.perf_counter() - start > self._spin_s or words[Word.CORE] == own_core():
                return False

    def _slept_until(self, ready: Callable[[], bool], advance: Callable[[], bool] | None) -> bool:
        left = advance() if advance is not None else False
        self.own.words[Word.ASLEEP] = 2 if left else 1
        if not ready():
            for handle, _ in self._poll.poll(SLICE_MS):
                if handle == self._ear:
                    os.read(self._ear, 4096)
        self.own.words[Word.ASLEEP] = 0
        return ready()

    def _check_peers(
        self, ready: Callable[[], bool], what: Callable[[], str], awaited: int
    ) -> None:
        for peer, segment in self.peers.items():
            if segment.words[Word.ABORTED]:
                raise PeerFailed(peer, f"rank {peer} failed while rank {self.rank} waited")
            # What it sent before it closed can still be read.
            if peer == awaited and segment.words[Word.CLOSED] and not ready():
                raise PeerVanished(
                    peer,
                    f"rank {peer} has closed its pipeline while rank {self.rank}, which "
                    f"{WATCH.phase}, waited for {what()}; if its data end early, give every rank "
                    f"the same batches",
                )
        for handle, _ in self._poll.poll(0):
            peer = self._rank_of_process.get(handle)
            if peer is None:
                continue
            if self.peers[peer].words[Word.CLOSED]:
                self._poll.unregister(handle)
            # What it sent before it ended can still be read.
            elif not ready():
                raise PeerVanished(
                    peer, f"rank {peer} ended while rank {self.rank} waited for {what()}"
                )

    def announce(
        self, values: list[float], what: str, advance: Callable[[], bool] | None = None
    ) -> Callable[[], list[list[float]]]:
        """Publish this rank's values. The returned function waits for those of all ranks, by rank.

        Every rank publishes equally many values, and waits for them before it publishes the next.
        So two banks suffice: a rank that writes values n + 2 has seen everybody's n + 1, which were
        written after reading all n. ``advance`` is that of `wait`.
        """
        self._exchanges += 1
        number = self._exchanges
        base = Word.BANKS + (number % 2) * BANK_WORDS
        own = self.own
        own.words[Word.CORE] = own_core()
        for place, value in enumerate(values, base + 1):
            own.numbers[place] = value
        own.words[base] = number
        for segment in self.peers.values():
            if segment.words[Word.ASLEEP]:
                segment.ring_bell()

        def of_all() -> list[list[float]]:
            for peer, segment in self.peers.items():
                words = segment.words

                def ready(words: memoryview = words) -> bool:
                    return words[base] == number

                self.wait(
                    ready,
                    lambda peer=peer: f"{what} of rank {peer}",
                    peer,
                    advance,
                    self.positions,
                )
            stop = base + 1 + len(values)
            return [list(self.all[rank].numbers[base + 1 : stop]) for rank in range(len(self.all))]

        return of_all

    def positions(self) -> tuple[int, ...]:
        """The latest published action of every peer."""
        return tuple(segment.words[Word.POSITION] for segment in self.peers.values())

    def abort(self) -> None:
        """Signal every peer that this rank has failed, and close the handles."""
        if self._ear < 0:
            return
        self.own.words[Word.ABORTED] = 1
        for segment in self.peers.values():
            segment.ring_bell()
        self._close_handles()

    def close(self) -> None:
        """Mark this rank as closed and close its handles."""
        self.own.words[Word.CLOSED] = 1
        self._close_handles()

    def _close_handles(self) -> None:
        if self._ear >= 0:
            os.close(self._ear)
            self._ear = -1
        for segment in self.all.values():
            segment.close_handles()


own_core: Callable[[], int] = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)
"""The processor core of this process (a library call that takes less than a microsecond)."""
