"""When one rank fails, all ranks report why: it leaves a note in the store that the others read."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

from torch.distributed import distributed_c10d

from penstock.errors import RunFailed, Stalled
from penstock.runtime.processes.watch import WATCH, connection_is_lost
from penstock.runtime.processes.world import World
from penstock.torch_internals import default_store

__all__ = ["AbortNote", "Failures", "PeerFailed", "PeerVanished"]

INSTANCES = count()
"""Numbers pipelines, which every rank creates in the same order."""

NOTE_WAIT_S = 1.5
"""How long a rank that noticed a failure waits for the note of the failed rank."""


class AbortNote:
    """The first failure of a run, in one line that all ranks can read.

    ``instance`` separates several pipelines of one process. A process that is ``alone`` has no
    notes: both methods do nothing.
    """

    def __init__(self, instance: int, alone: bool) -> None:
        self._key = f"penstock/{instance}/abort"
        self._store: distributed_c10d.Store | None = None
        if not alone:
            self._store = default_store()

    def write(self, text: str) -> None:
        """Write ``text`` for the other ranks, unless there is a note already."""
        if self._store is None:
            return
        try:
            self._store.compare_set(self._key, "", text)
        except RuntimeError:
            # The process with the store has ended, so nobody can read the note.
            self._store = None

    def read(self, wait_s: float = NOTE_WAIT_S) -> str:
        """The first failure; empty if nobody wrote one within ``wait_s``."""
        if self._store is None:
            return ""
        deadline = time.monotonic() + wait_s
        try:
            while not self._store.check([self._key]):
                if time.monotonic() > deadline:
                    return ""
                time.sleep(0.02)
            self._store.set_timeout(timedelta(seconds=5))
            return self._store.get(self._key).decode()
        except RuntimeError:
            return ""


class Failures:
    """Makes all ranks fail if one does. ``abort`` closes this rank's connections."""

    def __init__(self, world: World, abort: Callable[[], object]) -> None:
        self.first = ""
        self._rank, self._abort = world.rank, abort
        self._note = AbortNote(next(INSTANCES), alone=world.size == 1)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within, any exception ends all ranks, each with the message of the first failure."""
        if self.first:
            raise RunFailed(f"this pipeline has failed before ({self.first}); build a new one")
        try:
            yield
        except PeerFailed as failure:
            text = self._note.read() or str(failure)
            self._give_up(text)
            raise RunFailed(f"rank {self._rank} stopped: {text}") from failure
        except BaseException as failure:
            lost = any(connection_is_lost(each) for each in (failure, failure.__cause__) if each)
            if lost and (text := self._note.read()):
                # A collective operation: the other rank has failed first.
                self._give_up(text)
                raise RunFailed(f"rank {self._rank} stopped: {text}") from failure
            text = str(failure).partition("\n")[0] or type(failure).__name__
            if isinstance(failure, Stalled):
                text = WATCH.explained(text)
            who = f"rank {self._rank}"
            self._give_up(text if who in text else f"{who}: {text}")
            if isinstance(failure, Stalled):
                raise Stalled(text) from failure
            raise
        finally:
            # A wait that failed stays until here, because it explains the failure.
            WATCH.wait = None

    def _give_up(self, text: str) -> None:
        self.first = text
        self._note.write(text)
        self._abort()


class PeerFailed(RunFailed):
    """Rank ``peer`` raised an exception, which its note describes."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class PeerVanished(PeerFailed):
    """Rank ``peer``'s process ended without a note."""
