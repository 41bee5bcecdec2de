"""Tells the other ranks where this one is, so that a rank that waits too long can say why.

A thread writes this rank's position into the store twice a second. It reads plain attributes that
the runtime sets, so an action costs nothing more. A rank that has waited for some seconds reads the
positions of all. A process that is stopped writes none. The thread also ends a process whose data
do not come: all ranks may wait for theirs, and then none waits for another.

The texts by which errors of torch are told apart, for which torch has no types or attributes.

Gloo raises a plain `RuntimeError` for everything. All such texts are here, and a test provokes each
of these errors.
"""

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import wraps
from math import inf
from threading import Event, Thread
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist

from penstock.errors import RunFailed, Stalled
from penstock.runtime.processes.positions import Position, chain, circle

__all__ = [
    "BEAT_S",
    "BUILT",
    "LIMIT_S",
    "RARE_LIMIT_S",
    "WATCH",
    "CurrentWait",
    "connection_is_lost",
    "doing",
    "finish",
    "has_timed_out",
    "link_is_cut",
    "say_and_end",
]

P = ParamSpec("P")
R = TypeVar("R")
Item = TypeVar("Item")

BEAT_S = 0.5
"""How often a rank writes its position."""

LOOK_EVERY_S = 2.5
"""How often a rank that waits reads the positions of the others, and when it does so first."""

QUIET_S = 4.0
"""A rank that has written nothing for so long does not answer."""

LIMIT_S = 120.0
"""How long a rank may give no answer, unless `Pipeline` was given another limit."""

JOIN_LIMIT_S = 600.0
"""How long a rank of another host may take to join: it imports torch from a disk of its own."""

RARE_LIMIT_S = 1800.0
"""Time limit of rare exchanges in which one rank may work alone (checkpoint, verification)."""


BUILT, OWN_CODE = "has built its stages", "runs its own code"
"""The phases before the first call of a pipeline, and between two calls."""

CUT = "the link to the host of the run's store is cut"
"""Why the ranks cannot be asked where they are."""


class CurrentWait(NamedTuple):
    """What a rank waits for; see `Position`. It began at ``since_s`` of `time.perf_counter`."""

    what: Callable[[], str]
    peer: int
    meeting: str
    since_s: float


def say_and_end(failure: RunFailed) -> None:
    """End this process with the error's message and exit code, whatever its main thread does."""
    print(f"error: {failure}", file=sys.stderr, flush=True)
    os._exit(failure.exit_code)


END_S = 2.0
"""So long the end of the process waits for the thread, which may be in a call of a lost store."""


class Watch:
    """This process's part in it. The runtime sets ``phase``, ``action`` and ``wait``.

    ``acts``: the phase consists of actions. ``limit_s`` is how long another rank may not answer.
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
        self._seen: dict[int, tuple[int, float]] = {}
        self._positions: dict[int, Position | None] = {}
        self._looked_s = self._looking_since_s = self._stuck_since_s = -inf
        self._said = ""
        self._cut = False
        self._stuck: tuple[tuple[int, float], ...] = ()
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
            self._thread = Thread(target=self._look_after, name="penstock-watch", daemon=True)
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
        """The pipeline whose position is ``action`` is closed: lets go of what belonged to it."""
        self.phase += " and has closed its pipeline"
        self.wait = None
        if self.action == action:
            self.action = str

    @contextmanager
    def waiting(self, wait: CurrentWait) -> Iterator[None]:
        """Within, this rank waits."""
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
        """Called again and again by a rank that waits.

        Raises:
            Stalled: a rank has not answered for too long, ranks wait for one another for ever, or
                the store cannot be reached.
        """
        now_s = time.perf_counter()
        if self.wait is None or now_s - max(self.wait.since_s, self._looked_s) < LOOK_EVERY_S:
            return
        self._look()
        if self._cut:
            waited_s = time.perf_counter() - self.wait.since_s
            self._said = f"rank {self.rank} waited {waited_s:.0f} s for {self.wait.what()}; {CUT}"
            raise Stalled(self._said)
        if any(seconds > self._limit_of(rank) for rank, seconds in self.silent_s().items()):
            waited_s = now_s - self.wait.since_s
            text = f"rank {self.rank} waited {waited_s:.0f} s for {self.wait.what()}"
            self._said = self.explained(text)
            raise Stalled(self._said)
        self._check_circle(now_s)

    def explained(self, text: str) -> str:
        """``text``, which says what this rank waited for, and why that did not come."""
        if self._reads is None or text == self._said:
            return text
        self._look()
        if self._cut:
            return f"{text}; {CUT}"
        # Which ranks do not answer shows only after a while.
        time.sleep(max(0.0, QUIET_S + BEAT_S - (time.perf_counter() - self._looking_since_s)))
        self._look()
        why = chain(self.rank, self._positions, self.silent_s())
        return f"{text}; {why}" if why else text

    def silent_s(self) -> dict[int, float]:
        """The ranks that do not answer, and for how many seconds this rank has seen no sign."""
        now_s = time.perf_counter()
        ages = {rank: now_s - since_s for rank, (_, since_s) in self._seen.items()}
        return {rank: age for rank, age in ages.items() if age > QUIET_S and rank != self.rank}

    def _limit_of(self, rank: int) -> float:
        """How long a rank may not answer; one that has not joined yet may still start."""
        joined = self._positions.get(rank) is not None
        return self.limit_s if joined else max(self.limit_s, self.joins_within_s)

    def _check_circle(self, now_s: float) -> None:
        """Raise `Stalled` if ranks wait for one another and did so at the previous look."""
        found = circle(self._positions)
        waits = tuple((r, p.since_s) for r in found if (p := self._positions[r]) is not None)
        if not waits or waits != self._stuck or any(r in self.silent_s() for r in found):
            self._stuck, self._stuck_since_s = waits, now_s
            return
        if now_s - self._stuck_since_s < QUIET_S:
            return
        leaver, *others = (f"rank {r} {p.place}" for r in found if (p := self._positions[r]))
        self._said = (
            f"{leaver}, while {' and '.join(others)} and cannot go on without it; if the data of "
            f"rank {found[0]} end early, give every rank the same batches"
        )
        raise Stalled(self._said)

    def _look(self) -> None:
        """Read the positions of all ranks."""
        now_s = time.perf_counter()
        if now_s - self._looked_s > 2 * LOOK_EVERY_S:
            self._looking_since_s = now_s
            self._seen.clear()
        self._looked_s = now_s
        for rank in range(self.size):
            position = self.own() if rank == self.rank else self._read(rank)
            self._positions[rank] = position
            beat = position.beat if position is not None else -1
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now_s)

    def _read(self, rank: int) -> Position | None:
        try:
            if not self._reads.check([key_of(rank)]):
                return None
            return Position(**json.loads(self._reads.get(key_of(rank))))
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
                    self._writes.set(key_of(self.rank), json.dumps(asdict(self.own())))
                except RuntimeError:
                    self._writes = None


WATCH = Watch()
"""That of this process."""


def key_of(rank: int) -> str:
    """The key of a rank's position in the store."""
    return f"penstock/position/{rank}"


def after_batch(pipeline: object) -> str:
    """How far a pipeline is, for a phase."""
    steps = getattr(pipeline, "steps", None)
    return f" after batch {steps}" if steps else ""


def doing(what: str, *, acts: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a method or function the phase ``what`` while it runs; see `Watch`."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def within(*args: Any, **kwargs: Any) -> R:
            before = WATCH.phase, WATCH.acts
            WATCH.phase, WATCH.acts = f"{what}{after_batch(args[0])}", acts
            try:
                return method(*args, **kwargs)
            finally:
                WATCH.phase, WATCH.acts = before
                if WATCH.phase.startswith((BUILT, OWN_CODE)):
                    WATCH.phase = f"{OWN_CODE}{after_batch(args[0])}"

        return within

    return decorate


def finish(work: dist.Work | None, what: str, meeting: str = "") -> None:
    """Wait for a collective of all ranks, as long as they answer.

    Raises:
        Stalled: a rank does not answer, or waits elsewhere for this one.
        RunFailed: a rank has ended.
    """
    assert work is not None
    start_s = time.perf_counter()
    with WATCH.waiting(CurrentWait(lambda: what, -1, meeting, start_s)):
        while True:
            has_ended = work.is_completed()
            try:
                work.wait(timedelta(seconds=BEAT_S))
                return
            except RuntimeError as cause:
                # A wait for work that had ended before cannot run out of time.
                if has_ended:
                    raise RunFailed(
                        f"rank {WATCH.rank}, which {WATCH.phase}, lost another rank; see what that "
                        f"one says"
                    ) from cause
            if work.is_completed():
                continue
            if time.perf_counter() - start_s > RARE_LIMIT_S:
                raise Stalled(
                    WATCH.explained(f"rank {WATCH.rank} waited {RARE_LIMIT_S:g} s for {what}")
                )
            WATCH.check()


def has_timed_out(failure: BaseException) -> bool:
    """Whether an operation of a process group ended because its time limit was over."""
    return "imed out" in str(failure) or "imeout" in str(failure)


def connection_is_lost(failure: BaseException) -> bool:
    """Whether an operation of a Gloo group ended because another rank has left the group."""
    return "gloo/transport/tcp" in str(failure) and not has_timed_out(failure)


def link_is_cut(failure: BaseException) -> bool:
    """Whether a store's host is silent; otherwise the process that serves the store has ended."""
    return "timed out" in str(failure)
