"""Positions that all ranks publish, from which a rank that waits too long finds the cause.

A thread writes this rank's position into the store twice a second. It reads plain attributes that
the runtime sets, so an action costs nothing more. A rank that has waited for some seconds reads the
positions of all. A process that is stopped writes none. The thread also ends a process whose data
do not come: all ranks may wait for theirs, and then none waits for another.
"""

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from math import inf
from threading import Event, Thread
from typing import Any, NamedTuple, ParamSpec, TypeVar

from penstock.errors import RunFailed, Stalled

P = ParamSpec("P")
R = TypeVar("R")
Item = TypeVar("Item")

BEAT_S = 0.5
"""Seconds between two writes of a rank's position."""

LOOK_EVERY_S = 2.5
"""Seconds of a wait before a rank first reads the others' positions, and between two reads."""

QUIET_S = 4.0
"""Seconds without a write after which a rank does not answer."""

LIMIT_S = 120.0
"""Seconds that a rank may give no answer, unless `Pipeline` was given another limit."""

JOIN_LIMIT_S = 600.0
"""Seconds that a rank of another host may take to join: it imports torch from its own disk."""

RARE_LIMIT_S = 1800.0
"""Time limit of rare exchanges in which one rank may work alone (checkpoint, verification)."""

END_S = 2.0
"""Seconds that the process's end waits for the thread, which may be in a lost store's call."""

BUILT, OWN_CODE = "has built its stages", "runs its own code"
"""The phases before the first call of a pipeline, and between two calls."""

EXCHANGE = "exchange"
"""Prefix of the name of a meeting that a rank enters only after all sends and receives before."""

CUT = "the link to the host of the run's store is cut"
"""The reason why the positions of the ranks cannot be read."""


class CurrentWait(NamedTuple):
    """A rank's wait; see `Position`. It began at ``since_s`` of `time.perf_counter`."""

    what: Callable[[], str]
    peer: int
    meeting: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a rank: ``phase`` and ``action`` say what it does, as a verb with its object.

    It waits for ``what`` (empty: it does not wait) from ``peer``, or (-1) from all ranks that are
    not in the same ``meeting``, a collective operation. ``since_s`` is when the wait began, on the
    rank's own clock. ``beat`` rises as long as the rank is alive.
    """

    beat: int
    phase: str
    action: str = ""
    what: str = ""
    peer: int = -1
    meeting: str = ""
    since_s: float = 0.0
    waited_s: float = 0.0

    @property
    def place(self) -> str:
        """Phase and action of the rank, for messages."""
        return f"{self.phase}, {self.action}" if self.action else self.phase


Positions = Mapping[int, Position | None]
"""By rank; None: it has not joined the run."""


def awaited(rank: int, positions: Positions) -> list[int]:
    """The ranks for which ``rank`` waits, as far as its position shows."""
    position = positions.get(rank)
    if position is None or not position.what:
        return []
    if position.peer >= 0:
        return [position.peer]
    if not position.meeting:
        return []
    others = {peer: found for peer, found in positions.items() if peer != rank}
    return [p for p, found in others.items() if found is None or found.meeting != position.meeting]


def circle(positions: Positions) -> tuple[int, ...]:
    """Two ranks that wait for one another, the first in an exchange; empty if there are none.

    Such ranks wait for ever: nothing that the first has sent can still be under way, because a rank
    enters an exchange only when it has sent and received all before. Ranks that wait for one
    another within a step may wait for a message that is under way, so they are not meant.
    """
    for first, position in positions.items():
        if position is not None and position.meeting.startswith(EXCHANGE):
            for second in awaited(first, positions):
                if first in awaited(second, positions):
                    return first, second
    return ()


def chain(rank: int, positions: Positions, silent_s: Mapping[int, float]) -> str:
    """The reason why ``rank`` waits, from rank to rank up to the one that keeps all waiting.

    ``silent_s`` are the ranks that do not answer, and for how long.
    """
    seen, links = [rank], list[str]()
    while True:
        # A rank that does not answer explains more than one that waits itself.
        peers = sorted(awaited(seen[-1], positions), key=lambda peer: -silent_s.get(peer, 0.0))
        peer = next((peer for peer in peers if peer not in seen), None)
        if peer is None and peers:
            links.append(f"rank {peers[0]}: none of them can go on")
            break
        if peer is None:
            # It waits in a collective operation, which does not show for whom.
            peer = max(silent_s, key=lambda silent: silent_s[silent], default=None)
            if peer is None or peer in seen:
                break
        seen.append(peer)
        position = positions.get(peer)
        if position is not None and position.what and peer not in silent_s:
            waited = f"has waited {position.waited_s:.0f} s for {position.what}"
            links.append(f"rank {peer} ({position.place}; {waited})")
            continue
        if position is None:
            end = "has not joined the run"
        elif peer in silent_s:
            end = (
                f"has not answered for {silent_s[peer]:.0f} s: its process is stopped, dead or "
                f"hangs in a call (last heard of: {position.place})"
            )
        else:
            end = f"does not wait: it {position.place}"
        links.append(f"rank {peer}, which {end}" if links else f"rank {peer} {end}")
        break
    return ", which waits for ".join(links)


def say_and_end(failure: RunFailed) -> None:
    """End this process with the error's message and exit code, whatever its main thread does."""
    print(f"error: {failure}", file=sys.stderr, flush=True)
    os._exit(failure.exit_code)


class Heartbeat:
    """State that this process publishes. The runtime sets ``phase``, ``action`` and ``wait``.

    ``acts``: the phase consists of actions. ``limit_s``: seconds a rank may give no answer.
    One that has not joined yet may take ``joins_within_s``, if that is more. ``give_up`` ends this
    process when its data do not come.
    """

    def __init__(self) -> None:
        self.phase = "starts"
        self.acts = False
        self.action: Callable[[], str] = str
        self.wait: CurrentWait | None = None
        self.limit_s, self.joins_within_s = LIMIT_S, JOIN_LIMIT_S
        self.give_up: Callable[[RunFailed], None] = say_and_end
        self.rank, self.size = 0, 1
        self.meetings = 0
        self._beat = 0
        self._reads_since_s, self._reads_within_s = inf, inf
        self._thread: Thread | None = None
        self._reads: Any = None
        self._writes: Any = None
        self._positions: dict[int, Position | None] = {}
        self._changed_s: dict[int, float] = {}
        self._looked_s = self._looking_since_s = -inf
        self._stuck: tuple[tuple[int, float], ...] = ()
        self._stuck_since_s = -inf
        self._cut = False
        self._ended = Event()

    def begin(self, store: Any, rank: int, size: int) -> None:
        """Write positions into ``store`` from now on; does nothing if that has begun already."""
        if self._reads is not None or size == 1:
            return
        self.rank, self.size = rank, size
        # A store is locked while a rank waits in it, so the thread has a connection of its own.
        self._reads, self._writes = store.clone(), store.clone()
        self._begin_thread()

    def _begin_thread(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._look_after, name="penstock-heartbeat", daemon=True)
            self._thread.start()
            atexit.register(self._end_thread)

    def _end_thread(self) -> None:
        """End the thread before Python does: inside a call of the store that would abort."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(END_S)

    def read(self, data: Callable[[], Iterable[Item]], what: str, limit_s: float) -> Iterator[Item]:
        """The batches of ``data``, each of which must come within ``limit_s`` seconds (0: at all).

        If one does not come, this process ends by ``give_up``, since its main thread may hang in
        any call. ``what`` names the data.
        """
        self._begin_thread()
        iterator, number = None, 1
        while True:
            before = self.phase, self.acts
            self.phase, self.acts = f"is reading batch {number} of {what}", False
            self._reads_within_s, self._reads_since_s = limit_s or inf, time.perf_counter()
            try:
                iterator = iter(data()) if iterator is None else iterator
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._reads_since_s = inf
                self.phase, self.acts = before
            yield batch
            number += 1

    def closed(self, action: Callable[[], str]) -> None:
        """Record that the pipeline at ``action`` is closed; release what belonged to it."""
        self.phase += " and has closed its pipeline"
        self.wait = None
        if self.action == action:
            self.action = str

    @contextmanager
    def waiting(self, wait: CurrentWait) -> Generator[None]:
        """Publish ``wait`` as this rank's wait."""
        self.wait = wait
        try:
            yield
        finally:
            self.wait = None

    def own(self) -> Position:
        """The position of this rank."""
        wait, action = self.wait, self.action() if self.acts else ""
        if wait is None:
            return Position(self._beat, self.phase, action)
        what, peer, meeting, since_s = wait
        waited_s = time.perf_counter() - since_s
        return Position(self._beat, self.phase, action, what(), peer, meeting, since_s, waited_s)

    def check(self) -> None:
        """Raise if a rank does not answer, or two wait for each other; called while waiting."""
        now_s = time.perf_counter()
        if self.wait is None or now_s - max(self.wait.since_s, self._looked_s) < LOOK_EVERY_S:
            return
        self._look()
        silent_s = self._silent_s()
        if self._cut or any(age_s > self._limit_of(rank) for rank, age_s in silent_s.items()):
            waited_s = time.perf_counter() - self.wait.since_s
            raise self.stalled(f"rank {self.rank} waited {waited_s:.0f} s for {self.wait.what()}")
        found = circle(self._positions)
        waits = tuple((r, p.since_s) for r in found if (p := self._positions[r]) is not None)
        if not waits or waits != self._stuck or any(rank in silent_s for rank in found):
            self._stuck, self._stuck_since_s = waits, now_s
        elif now_s - self._stuck_since_s >= QUIET_S:
            leaver, other = (f"rank {r} {p.place}" for r in found if (p := self._positions[r]))
            raise Stalled(
                f"{leaver}, while {other} and cannot go on without it; if the data of "
                f"rank {found[0]} end early, give every rank the same batches"
            )

    def stalled(self, text: str) -> Stalled:
        """The error with ``text``, which names what this rank waited for, and why it did not come.

        What it waited for is still set.
        """
        if self._reads is not None and not self._cut:
            self._look()
            # Which ranks do not answer shows only after a while.
            time.sleep(max(0.0, QUIET_S + BEAT_S - (self._looked_s - self._looking_since_s)))
            self._look()
        why = CUT if self._cut else chain(self.rank, self._positions, self._silent_s())
        return Stalled(f"{text}; {why}" if why else text)

    def _silent_s(self) -> dict[int, float]:
        """The ranks that do not answer, and for how many seconds this rank has seen no sign."""
        now_s = time.perf_counter()
        ages_s = {rank: now_s - changed_s for rank, changed_s in self._changed_s.items()}
        return {rank: age_s for rank, age_s in ages_s.items() if age_s > QUIET_S}

    def _limit_of(self, rank: int) -> float:
        """Return the seconds a rank may give no answer; one that has not joined may still start."""
        joined = self._positions.get(rank) is not None
        return self.limit_s if joined else max(self.limit_s, self.joins_within_s)

    def _look(self) -> None:
        """Read the positions of all ranks."""
        now_s = time.perf_counter()
        if now_s - self._looked_s > 2 * LOOK_EVERY_S:
            self._looking_since_s = now_s
            self._changed_s.clear()
        self._looked_s = now_s
        self._positions[self.rank] = self.own()
        for rank in range(self.size):
            if rank == self.rank:
                continue
            before, found = self._positions.get(rank), self._read(rank)
            self._positions[rank] = found
            if rank not in self._changed_s or (found and found.beat) != (before and before.beat):
                self._changed_s[rank] = now_s

    def _read(self, rank: int) -> Position | None:
        try:
            if not self._reads.check([position_key(rank)]):
                return None
            return Position(**json.loads(self._reads.get(position_key(rank))))
        except RuntimeError as cause:
            # Otherwise the store has ended with its process.
            self._cut = self._cut or link_is_cut(cause)
            return self._positions.get(rank)

    def _look_after(self) -> None:
        while not self._ended.wait(BEAT_S if self._beat else 0.0):
            self._beat += 1
            if time.perf_counter() - self._reads_since_s > self._reads_within_s:
                self.give_up(
                    Stalled(
                        f"rank {self.rank} {self.phase}, which has not come within "
                        f"{self._reads_within_s:g} s (batch_limit_s); see what the data wait for, "
                        f"or raise the limit in the job file"
                    )
                )
            if self._writes is not None:
                try:
                    self._writes.set(position_key(self.rank), json.dumps(asdict(self.own())))
                except RuntimeError:
                    self._writes = None


HEARTBEAT = Heartbeat()
"""That of this process."""


def position_key(rank: int) -> str:
    """The key of a rank's position in the store."""
    return f"penstock/position/{rank}"


def link_is_cut(failure: BaseException) -> bool:
    """Return whether a store's host is silent; otherwise the process that serves it has ended.

    Torch has one type for both, so the text decides.
    """
    return "timed out" in str(failure)


def doing(what: str, *, acts: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a method or function the phase ``what`` while it runs; see `Heartbeat`."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def within(*args: Any, **kwargs: Any) -> R:
            before = HEARTBEAT.phase, HEARTBEAT.acts
            HEARTBEAT.phase, HEARTBEAT.acts = f"{what}{after_batch(args[0])}", acts
            try:
                return method(*args, **kwargs)
            finally:
                HEARTBEAT.phase, HEARTBEAT.acts = before
                if HEARTBEAT.phase.startswith((BUILT, OWN_CODE)):
                    HEARTBEAT.phase = f"{OWN_CODE}{after_batch(args[0])}"

        return within

    return decorate


def after_batch(pipeline: object) -> str:
    """Words for a phase: the number of batches that a pipeline has done."""
    steps = getattr(pipeline, "steps", None)
    return f" after batch {steps}" if steps else ""
