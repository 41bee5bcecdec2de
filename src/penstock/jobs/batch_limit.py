"""Ends the wait for a batch that does not come."""

import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

from penstock.errors import Stalled

__all__ = ["within_limit", "without_hanging"]

Item = TypeVar("Item")

AGAIN_S = 1.0
"""Seconds after which the error is raised again, if the data's own code has suppressed it."""

LONGEST_S = 1e8
"""The most seconds that an alarm takes."""


def within_limit(batches: Iterable[Item], limit_s: float, data: str) -> Iterator[Item]:
    """``batches``, each of which must come within ``limit_s`` seconds; ``data`` names them.

    Raises:
        Stalled: a batch has not come in time.
    """
    iterator, end = iter(batches), object()
    for number in count(1):
        with without_hanging(limit_s, f"{data}: batch {number}"):
            batch = next(iterator, end)
        if batch is end:
            return
        yield batch  # type: ignore[misc]  # it is no end


@contextmanager
def without_hanging(limit_s: float, what: str) -> Generator[None]:
    """Raise in the block after ``limit_s`` seconds (0: never), in the main thread only.

    An alarm also interrupts sleeping, and waiting for locks, files, sockets and processes.

    Raises:
        Stalled: the time has passed; the message begins with ``what``.
    """
    if not limit_s or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: object) -> None:
        raise Stalled(
            f"{what} has not come within {limit_s:g} s (batch_limit_s); see what the data wait "
            f"for, or raise the limit in the job file"
        )

    handler, start_s = signal.signal(signal.SIGALRM, over), time.monotonic()
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, min(limit_s, LONGEST_S), AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            # Another alarm was set before.
            left_s = max(0.001, left_s - (time.monotonic() - start_s))
            signal.setitimer(signal.ITIMER_REAL, left_s, again_s)
