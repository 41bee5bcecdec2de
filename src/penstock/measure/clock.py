"""Stopwatches for work on a device."""

import time
from collections.abc import Callable

import torch

__all__ = ["Stopwatch", "work_s"]

Stopwatch = Callable[[Callable[[], object]], float]
"""Runs a piece of work once and returns its seconds."""


def work_s(device: torch.device, *, shares_cores: bool = False) -> Stopwatch:
    """A stopwatch for work on ``device``: CUDA events, the wall clock, or CPU time.

    If processes share too few cores (``shares_cores``), the wall clock would also count the time
    that a process waits for a core. CPU time does not, but includes the slow-down by shared caches.
    """
    if device.type == "cuda":
        return cuda_s
    return computing_s if shares_cores else wall_s


def computing_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process during ``work``, which must use one thread."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def wall_s(work: Callable[[], object]) -> float:
    """Seconds of ``work`` by the wall clock."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def cuda_s(work: Callable[[], object]) -> float:
    """Seconds that ``work`` keeps the current CUDA stream busy, including kernel launches."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
