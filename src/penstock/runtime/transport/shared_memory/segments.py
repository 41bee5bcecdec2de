"""Memory that the ranks of one host share, and the pipes by which they wake one another.

Every rank owns one anonymous segment (``memfd``) and one pipe. Its peers open both through
``/proc/<pid>/fd``. Neither has a name in a file system, so nothing is left behind, however a
process ends. A segment begins with words that only its owner writes. They are followed by one
ring for each rank that sends to the owner.
"""

import ctypes
import mmap
import os
import platform
import select
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from penstock.errors import PeerFailed
from penstock.runtime.processes.heartbeat import HEARTBEAT, CurrentWait
from penstock.runtime.processes.world import World

HEADER_BYTES = 4096
BANK_WORDS = 64
CACHE_LINE_BYTES = 64
SLICE_MS = 5
"""A sleeping rank checks this often, in milliseconds, in case a wake-up is lost in a race."""

LEAST_SPIN_S = 20e-6


# Indexes of the owner's words at the start of its segment, one cache line each.
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

    ``rings[sender]`` is the offset of a sender's ring, and its size. ``wakeup`` is the end of the
    owner's pipe to write to.
    """

    memory: mmap.mmap
    rings: Mapping[int, tuple[int, RingSize]]
    wakeup: int
    process: int = -1
    words: memoryview = field(init=False)
    numbers: "memoryview[float]" = field(init=False)  # pyright: ignore[reportInvalidTypeArguments]

    def __post_init__(self) -> None:
        header = memoryview(self.memory)[:HEADER_BYTES]
        self.words = header.cast("Q")
        self.numbers = header.cast("d")

    def wake(self) -> None:
        """Wake the owner. A full pipe means that it has already been woken.

        Its ASLEEP word is cleared first, so that later messages do not wake it again.
        """
        self.words[ASLEEP] = 0
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.wakeup, b"!")

    def close_handles(self) -> None:
        """Close the handles; the memory is released when nothing refers to it any more."""
        for handle in (self.wakeup, self.process):
            if handle >= 0:
                os.close(handle)
        # The kernel gives the numbers to other files.
        self.wakeup = self.process = -1


class Segments:
    """The segments of all ranks, with functions that wait for changes in them."""

    def __init__(
        self,
        rank: int,
        segments: dict[int, SharedSegment],
        wakeups: int,
        timeout_s: float,
        spin_s: float,
    ) -> None:
        self.rank = rank
        self.own = segments[rank]
        self.peers = {peer: segment for peer, segment in segments.items() if peer != rank}
        self.all = segments
        self._wakeups = wakeups
        self._timeout_s = timeout_s
        self._spin_limit_s = self._spin_s = max(spin_s, LEAST_SPIN_S)
        self._exchanges = 0
        self._poll = select.poll()
        self._poll.register(wakeups, select.POLLIN)
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
        """
        start = time.perf_counter()
        if self._spun_until(ready, peer, advance, start):
            return
        seen = progress() if progress is not None else None
        HEARTBEAT.wait = CurrentWait(what, peer, "", start)
        while not self._slept_until(ready, advance):
            self._check_peers(ready, what, peer)
            if progress is not None and progress() != seen:
                seen, start = progress(), time.perf_counter()
            if time.perf_counter() - start > self._timeout_s:
                raise HEARTBEAT.stalled(
                    f"rank {self.rank} waited {self._timeout_s:g} s for {what()}"
                )
            HEARTBEAT.check()
        HEARTBEAT.wait = None
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
            if time.perf_counter() - start > self._spin_s or words[CORE] == own_core():
                return False

    def _slept_until(self, ready: Callable[[], bool], advance: Callable[[], bool] | None) -> bool:
        left = advance() if advance is not None else False
        self.own.words[ASLEEP] = 2 if left else 1
        if not ready():
            for handle, _ in self._poll.poll(SLICE_MS):
                if handle == self._wakeups:
                    os.read(self._wakeups, 4096)
        self.own.words[ASLEEP] = 0
        return ready()

    def _check_peers(
        self, ready: Callable[[], bool], what: Callable[[], str], awaited: int
    ) -> None:
        for peer, segment in self.peers.items():
            if segment.words[ABORTED]:
                raise PeerFailed(f"rank {peer} failed while rank {self.rank} waited")
            # What it sent before it closed can still be read.
            if peer == awaited and segment.words[CLOSED] and not ready():
                raise PeerFailed(
                    f"rank {peer} has closed its pipeline while rank {self.rank}, which "
                    f"{HEARTBEAT.phase}, waited for {what()}; if its data end early, give every "
                    f"rank the same batches"
                )
        for handle, _ in self._poll.poll(0):
            peer = self._rank_of_process.get(handle)
            if peer is None:
                continue
            if self.peers[peer].words[CLOSED]:
                self._poll.unregister(handle)
            # What it sent before it ended can still be read.
            elif not ready():
                raise PeerFailed(f"rank {peer} ended while rank {self.rank} waited for {what()}")

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
        base = BANKS + (number % 2) * BANK_WORDS
        own = self.own
        own.words[CORE] = own_core()
        for place, value in enumerate(values, base + 1):
            own.numbers[place] = value
        own.words[base] = number
        for segment in self.peers.values():
            if segment.words[ASLEEP]:
                segment.wake()

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
        return tuple(segment.words[POSITION] for segment in self.peers.values())

    def abort(self) -> None:
        """Signal every peer that this rank has failed, and close the handles."""
        if self._wakeups < 0:
            return
        self.own.words[ABORTED] = 1
        for segment in self.peers.values():
            segment.wake()
        self._close_handles()

    def close(self) -> None:
        self.own.words[CLOSED] = 1
        self._close_handles()

    def _close_handles(self) -> None:
        if self._wakeups >= 0:
            os.close(self._wakeups)
            self._wakeups = -1
        for segment in self.all.values():
            segment.close_handles()


own_core: Callable[[], int] = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)
"""The processor core of this process (a library call that takes less than a microsecond)."""


@dataclass(frozen=True)
class Invitation:
    pid: int
    memory: int
    wakeup: int
    size_bytes: int
    rings: dict[int, tuple[int, RingSize]]


def join_segments(
    world: World, rings_in: Mapping[int, RingSize], *, spin_s: float
) -> Segments | None:
    """Create this rank's segment and open the others'; ``None`` on all ranks if any rank fails."""
    # The rings need stores to become visible in program order, which x86-64 guarantees.
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "memfd_create"):
        return None
    size = HEADER_BYTES
    rings: dict[int, tuple[int, RingSize]] = {}
    for sender, ring in rings_in.items():
        rings[sender] = (size, ring)
        size += -(-ring.bytes // HEADER_BYTES) * HEADER_BYTES
    with ExitStack() as undo, ExitStack() as opening:
        memory = os.memfd_create("penstock")
        opening.callback(os.close, memory)
        os.ftruncate(memory, size)
        wakeups, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        undo.callback(os.close, wakeups)
        own = SharedSegment(mmap.mmap(memory, size), rings, wakeup)
        undo.callback(own.close_handles)
        invitations = world.all_gather(
            Invitation(os.getpid(), memory, wakeup, size, rings), Invitation, RingSize
        )

        def open_all() -> dict[int, SharedSegment]:
            return {
                rank: own if rank == world.rank else accept(invitation, undo)
                for rank, invitation in enumerate(invitations)
            }

        try:
            segments = world.all_succeed(open_all, OSError)
        except OSError:
            return None
        undo.pop_all()
        return Segments(world.rank, segments, wakeups, world.timeout_s, spin_s)


def accept(invitation: Invitation, undo: ExitStack) -> SharedSegment:
    """Open a peer's segment, its pipe, and a handle that becomes readable when its process ends.

    ``undo`` closes the handles.
    """
    view = open_memory(invitation.pid, invitation.memory, invitation.size_bytes)
    wakeup = os.open(
        f"/proc/{invitation.pid}/fd/{invitation.wakeup}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    )
    segment = SharedSegment(view, invitation.rings, wakeup)
    undo.callback(segment.close_handles)
    segment.process = os.pidfd_open(invitation.pid)
    return segment


def open_memory(process: int, handle: int, size_bytes: int) -> mmap.mmap:
    """Map the anonymous memory that ``process`` (possibly this one) has open as ``handle``."""
    memory = os.open(f"/proc/{process}/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(memory, size_bytes)
    finally:
        os.close(memory)
