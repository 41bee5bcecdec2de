"""Report of a rank's failure on all ranks: it leaves a note in the store that the others read."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from itertools import count

from penstock.errors import PeerFailed, RunFailed
from penstock.runtime.processes.heartbeat import BEAT_S, HEARTBEAT
from penstock.runtime.processes.world import World, connection_is_lost
from penstock.torch_internals import default_store

INSTANCES = count()
"""Numbers of pipelines, which every rank creates in the same order."""

NOTE_WAIT_S = 1.5
"""Seconds that a rank that noticed a failure waits for the note of the failed rank."""


class Failures:
    """Failure of all ranks if one fails. ``abort`` closes this rank's connections.

    ``first`` is the first failure, in a line; empty as long as there is none.
    """

    def __init__(self, world: World, abort: Callable[[], object]) -> None:
        self.first = ""
        self._rank, self._abort = world.rank, abort
        # The number separates several pipelines of one process.
        self._key = f"penstock/{next(INSTANCES)}/abort"
        self._store = default_store() if world.size > 1 else None
        self._looked_s = 0.0

    def check(self) -> None:
        """Raise if another rank has failed; called repeatedly by a rank that waits for its GPU.

        A GPU that waits for a rank that has ended waits on, while Gloo raises an error.
        """
        HEARTBEAT.check()
        now_s = time.monotonic()
        if self._store is None or now_s - self._looked_s < BEAT_S:
            return
        self._looked_s = now_s
        try:
            failed = self._store.check([self._key])
        except RuntimeError as cause:
            raise PeerFailed("the process with the store of the run has ended") from cause
        if failed:
            raise PeerFailed("another rank has failed")

    @contextmanager
    def shared(self) -> Generator[None]:
        """End all ranks at any exception, each with the message of the first failure."""
        if self.first:
            raise RunFailed(f"this pipeline has failed before ({self.first}); build a new one")
        try:
            yield
        except BaseException as failure:
            lost = any(connection_is_lost(each) for each in (failure, failure.__cause__) if each)
            note = self._note() if lost or isinstance(failure, PeerFailed) else ""
            text = note or str(failure).partition("\n")[0] or type(failure).__name__
            who = f"rank {self._rank}"
            self.first = text if who in text or note else f"{who}: {text}"
            self._leave_note(self.first)
            self._abort()
            if note or isinstance(failure, PeerFailed):
                raise RunFailed(f"{who} stopped: {text}") from failure
            raise
        finally:
            # A wait that failed stays until here, because it explains the failure.
            HEARTBEAT.wait = None

    def leave(self, failure: BaseException) -> None:
        """Report an error in the user's loop to the other ranks, which may wait for this one."""
        if not self.first:
            line = str(failure).partition("\n")[0]
            self._leave_note(f"rank {self._rank}: {line or type(failure).__name__}")

    def _leave_note(self, text: str) -> None:
        # There may be one already. Or the process with the store has ended, and nobody can read it.
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.compare_set(self._key, "", text)

    def _note(self) -> str:
        """The note of the rank that failed first; empty if it comes not in time."""
        deadline_s = time.monotonic() + NOTE_WAIT_S
        with suppress(RuntimeError):
            while self._store is not None and time.monotonic() < deadline_s:
                if self._store.check([self._key]):
                    return self._store.get(self._key).decode()
                time.sleep(0.02)
        return ""
