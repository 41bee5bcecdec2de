"""Whether other work kept the machine busy while something was measured on it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from time import perf_counter

__all__ = ["LoadWatch", "MachineLoad", "SystemCounts", "busy_beside", "system_counts"]

MOST_SWITCHES_PER_S = 50.0
"""A process that has a core for itself loses it less often: the system's own work takes it."""

MOST_SPREAD = 1.5
"""On an idle machine the slowest of a few repeats takes less than so many times the fastest."""


@dataclass(frozen=True, slots=True)
class SystemCounts:
    """What the system counts: its load average of the last minute; how often this process has lost
    its core; the clock, in seconds."""

    load: float
    switches: int
    now_s: float


def system_counts() -> SystemCounts:
    """The counts of now."""
    return SystemCounts(os.getloadavg()[0], getrusage(RUSAGE_SELF).ru_nivcsw, perf_counter())


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """The load before a measurement, on so many cores; how often a second it lost its core; and how
    many times as long as the fastest the slowest repeats took."""

    before: float
    cores: int
    switches_per_s: float
    spread: float

    def __str__(self) -> str:
        return f"load {self.before:.1f} on {self.cores} core{'s' * (self.cores > 1)}"

    @property
    def warning(self) -> str:
        """That the times cannot be trusted, and why, in one line; empty if they can."""
        contended = self.before > self.cores or self.switches_per_s > MOST_SWITCHES_PER_S
        if not contended and self.spread <= MOST_SPREAD:
            return ""
        lost = f", {self.switches_per_s:.0f} involuntary switches a second"
        return (
            f"{'machine busy' if contended else 'unsteady times'} ({self}"
            f"{lost if self.switches_per_s > MOST_SWITCHES_PER_S else ''}), "
            f"times vary by x {self.spread:.2g}; measure again while nothing else runs"
        )


class LoadWatch:
    """Watches the load from its making on; `add` takes the repeats of what is measured.

    ``shares_cores``: this process and its own kind take the cores from one another.
    """

    def __init__(
        self,
        cores: int,
        shares_cores: bool = False,
        counts: Callable[[], SystemCounts] = system_counts,
    ) -> None:
        self._cores, self._shares_cores, self._counts = cores, shares_cores, counts
        self._start, self._least_s, self._most_s = counts(), 0.0, 0.0

    def add(self, repeats: Sequence[float]) -> None:
        """Add the seconds that the same work took, time after time."""
        self._least_s += min(repeats)
        self._most_s += max(repeats)

    def load(self) -> MachineLoad:
        """The load until now."""
        now, start = self._counts(), self._start
        switches = 0 if self._shares_cores else now.switches - start.switches
        passed_s = now.now_s - start.now_s
        return MachineLoad(
            start.load,
            self._cores,
            switches / passed_s if passed_s > 0 else 0.0,
            self._most_s / self._least_s if self._least_s > 0 else 1.0,
        )


def busy_beside(workers: int, cores: int, load: float) -> str:
    """That other work ran beside ``workers`` workers, in one line; empty if none did.

    >>> busy_beside(2, 2, 6.25), busy_beside(2, 2, 2.4)
    ('machine busy (load 6.2 with 2 workers on 2 cores)', '')
    """
    if load <= workers + 1:
        return ""
    return f"machine busy (load {load:.1f} with {workers} workers on {cores} cores)"
