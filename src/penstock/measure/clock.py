"""Seconds of a piece of work on a device."""

import time
from collections.abc import Callable

import torch

__all__ = ["Stopwatch", "work_s"]

Stopwatch = Callable[[Callable[[], object]], float]
"""Runs a piece of work once and returns its seconds."""


def work_s(device: torch.device, *, shares_cores: bool = False) -> Stopwatch:
    """A stopwatch for work on ``device``: the wall clock on a CPU, events on a CUDA stream.

    Where processes share too few cores (``shares_cores``), the wall clock counts how long a process
    waited for its core too; the seconds that it computed are wanted, with what the others' use of
    the caches adds to them.
    """
    if device.type == "cuda":
        return cuda_s
    return computing_s if shares_cores else wall_s


def computing_s(work: Callable[[], object]) -> float:
    """Seconds that this process computes during ``work``, on one thread."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def wall_s(work: Callable[[], object]) -> float:
    """Seconds of ``work`` by the wall clock."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def cuda_s(work: Callable[[], object]) -> float:
    """Seconds that ``work`` keeps the current CUDA stream busy, its launches included."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
