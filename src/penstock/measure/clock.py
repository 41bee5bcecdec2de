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
from penstock.machine import core_seconds


class HostStopwatch:
    """A stopwatch that runs a piece of work and returns its seconds.

    Those in which this thread waited for a core, which others had, count only ``with_waits``. With
    one thread they are CPU seconds, which have no waits, and also what the process does beside.
    """

    def __init__(self, *, with_waits: bool) -> None:
        by_cpu = not with_waits and torch.get_num_threads() == 1
        self._now = time.process_time if by_cpu else time.perf_counter
        self._leaves_out_waits = not with_waits and not by_cpu

    def __call__(self, work: Callable[[], object]) -> float:
        """Run ``work`` once; its seconds."""
        self.restart()
        work()
        # Waits are read within the seconds, at both ends; else one between two readings would be
        # taken off that is not in the seconds, and may be longer than they are.
        waited_s = self._waited_s() - self._start_waited_s
        return self._now() - self._start_s - waited_s

    def restart(self) -> None:
        """Drop the seconds that the work which is running has taken until now."""
        self._start_s = self._now()
        self._start_waited_s = self._waited_s()

    def _waited_s(self) -> float:
        return core_seconds()[1] if self._leaves_out_waits else 0.0


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
    with_waits: bool = False,
    ahead: bool = False,
    launches: bool = True,
) -> Stopwatch:
    """A stopwatch for work on ``device``, by the clock of the host or of a GPU.

    ``with_waits`` is that of `HostStopwatch`, ``ahead`` and ``launches`` those of `GpuStopwatch`.
    """
    if is_gpu(device):
        return GpuStopwatch(device, ahead=ahead, launches=launches)
    return HostStopwatch(with_waits=with_waits)


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
