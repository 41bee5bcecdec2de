"""Seconds of a piece of work on a device."""

import time
from collections.abc import Callable

import torch

__all__ = ["Stopwatch", "work_s"]

Stopwatch = Callable[[Callable[[], object]], float]
"""Runs a piece of work once and returns its seconds."""


def work_s(device: torch.device) -> Stopwatch:
    """A stopwatch for work on ``device``: the wall clock on a CPU, events on a CUDA stream."""
    return cuda_s if device.type == "cuda" else wall_s


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
