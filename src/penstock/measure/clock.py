"""Stopwatches for work on a device.

A GPU runs behind the host, which launches its work. In training the launches are ahead, so a layer
takes what its kernels take. Measured alone it would take what its launches take, if these are
longer. So a stopwatch can hold the GPU until the host is ahead.
"""

import time
from collections.abc import Callable
from typing import TypeAlias

import torch

from penstock.device import flush_cache, hold, is_gpu, timing_mark, wait_for


class HostStopwatch:
    """A stopwatch that runs a piece of work and returns its seconds by the clock ``now``."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def __call__(self, work: Callable[[], object]) -> float:
        """Run ``work`` once; its seconds."""
        self.restart()
        work()
        return self._now() - self._start_s

    def restart(self) -> None:
        """Drop the seconds that the work which is running has taken until now."""
        self._start_s = self._now()


FIRST_HOLD_S, LONGEST_HOLD_S = 0.005, 0.05
"""Seconds for which a GPU is held, at first and at most: the first launches of all take seconds."""


class GpuStopwatch:
    """A stopwatch by marks on a GPU's stream.

    With ``ahead`` the GPU is held before each start for longer than the host took to launch the
    work before, and its cache is flushed. With ``launches`` their seconds count if they take longer
    than the kernels: they are what the GPU would wait for.
    """

    def __init__(self, device: torch.device, *, ahead: bool, launches: bool) -> None:
        self._device, self._hold_s = device, FIRST_HOLD_S if ahead else 0.0
        self._launches = launches

    def __call__(self, work: Callable[[], object]) -> float:
        self.restart()
        work()
        launched_s = time.perf_counter() - self._start_s
        end = timing_mark(self._device)
        held = self._hold_s and not self._start.query()
        if self._hold_s:
            self._hold_s = min(max(2 * launched_s, self._hold_s / 2), LONGEST_HOLD_S)
        wait_for(self._device)
        computed_s = self._start.elapsed_time(end) / 1000
        return max(computed_s, launched_s) if held and self._launches else computed_s

    def restart(self) -> None:
        wait_for(self._device)
        if self._hold_s:
            flush_cache(self._device)
            hold(self._device, self._hold_s)
        self._start, self._start_s = timing_mark(self._device), time.perf_counter()


Stopwatch: TypeAlias = HostStopwatch | GpuStopwatch


def work_s(
    device: torch.device,
    *,
    shares_cores: bool = False,
    ahead: bool = False,
    launches: bool = True,
) -> Stopwatch:
    """A stopwatch for work on ``device``: by the wall clock, by CPU time, or by a GPU's own.

    If processes share too few cores (``shares_cores``), the wall clock would also count the time
    that a process waits for a core. CPU time does not, but includes the slow-down by shared caches,
    and the work must use one thread. ``ahead`` and ``launches`` are those of `GpuStopwatch`.
    """
    if is_gpu(device):
        return GpuStopwatch(device, ahead=ahead, launches=launches)
    return HostStopwatch(lambda: time.process_time() if shares_cores else time.perf_counter())


WARM_UP_S = 0.5
WARM_UP_SIDE = 2048


def warm_up(device: torch.device) -> None:
    """Let a GPU compute until its clock has risen; that of an idle one is several times slower."""
    if not is_gpu(device):
        return
    matrix = torch.zeros(WARM_UP_SIDE, WARM_UP_SIDE, device=device)
    until_s = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until_s:
        _ = matrix @ matrix
        wait_for(device)
