"""Stopwatches for work on a device."""

import time
from collections.abc import Callable

import torch

from penstock.device import is_gpu, wait_for

__all__ = ["Stopwatch", "wall_s", "work_s"]


class Stopwatch:
    """Runs a piece of work and returns its seconds by the clock ``now``."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def __call__(self, work: Callable[[], object]) -> float:
        """Run ``work`` once; its seconds."""
        self.restart()
        work()
        return self._now() - self._start_s

    def restart(self) -> None:
        """Forget the seconds that the work which is running has taken until now."""
        self._start_s = self._now()


def work_s(device: torch.device, *, shares_cores: bool = False) -> Stopwatch:
    """A stopwatch for work on ``device``: by the wall clock, or by CPU time.

    If processes share too few cores (``shares_cores``), the wall clock would also count the time
    that a process waits for a core. CPU time does not, but includes the slow-down by shared caches,
    and the work must use one thread. On a GPU all work that was started is waited for.
    """

    def now() -> float:
        wait_for(device)
        by_cpu_time = shares_cores and not is_gpu(device)
        return time.process_time() if by_cpu_time else time.perf_counter()

    return Stopwatch(now)


def wall_s(work: Callable[[], object]) -> float:
    """Seconds of ``work`` by the wall clock."""
    return Stopwatch(time.perf_counter)(work)
