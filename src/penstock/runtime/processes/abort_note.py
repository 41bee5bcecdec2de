"""When one rank fails, every rank says why: a note in the run's store, read by those who wait."""

import time
from datetime import timedelta

from torch.distributed import distributed_c10d

__all__ = ["AbortNote"]

NOTE_WAIT_S = 1.5
"""How long a rank that noticed a failure waits for the note of the rank that failed."""


class AbortNote:
    """The first failure of a run, in one line that all ranks can read.

    ``instance`` keeps several pipelines of one process apart. Without other processes there is
    nobody to tell, and both methods do nothing.
    """

    def __init__(self, instance: int, alone: bool) -> None:
        self._key = f"penstock/{instance}/abort"
        self._store: distributed_c10d.Store | None = None
        if not alone:
            self._store = distributed_c10d._get_default_store()

    def write(self, text: str) -> None:
        """Leave ``text`` for the others, unless somebody was faster."""
        if self._store is None:
            return
        try:
            self._store.compare_set(self._key, "", text)
        except RuntimeError:
            # The store went down with its process: then there is nobody left to read.
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
