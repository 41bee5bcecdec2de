"""Signs of other work that kept the machine busy while something was measured on it."""

import os
from collections.abc import Callable, Sequence
from resource import RUSAGE_SELF, getrusage
from time import perf_counter

from penstock.plan.problem import PREDICTION_ERROR, SHARED_CORES_ERROR

MOST_SWITCHES_PER_S = 50.0
"""Involuntary switches per second that a process with a core for itself stays below."""

MOST_SPREAD = 1.5
"""Ratio of the slowest of a few repeats to the fastest that an idle machine stays below."""


def system_counts() -> tuple[float, int, float]:
    """The load average of the last minute, how often this process lost its core, and the clock."""
    return os.getloadavg()[0], getrusage(RUSAGE_SELF).ru_nivcsw, perf_counter()


class LoadWatch:
    """The load of the machine from the making of this object on.

    ``shares_cores``: this process and its own kind take the cores from each other.
    """

    def __init__(
        self,
        cores: int,
        shares_cores: bool = False,
        counts: Callable[[], tuple[float, int, float]] = system_counts,
    ) -> None:
        self._cores, self._shares_cores, self._counts = cores, shares_cores, counts
        self._start, self._least_s, self._most_s = counts(), 0.0, 0.0

    def add(self, repeats: Sequence[float]) -> None:
        """Add the seconds that the same work took, time after time."""
        self._least_s += min(repeats)
        self._most_s += max(repeats)

    def __str__(self) -> str:
        return f"load {self._start[0]:.1f} on {self._cores} core{'s' * (self._cores > 1)}"

    def warnings(self) -> tuple[str, ...]:
        """A line that says why the times until now cannot be trusted; empty if they can."""
        load, switches, start_s = self._start
        _, switches_now, now_s = self._counts()
        switches_per_s = (switches_now - switches) / max(now_s - start_s, 1e-9)
        lost = not self._shares_cores and switches_per_s > MOST_SWITCHES_PER_S
        busy, spread = lost or load > self._cores, self._most_s / (self._least_s or 1.0)
        error = SHARED_CORES_ERROR if self._shares_cores else PREDICTION_ERROR
        if spread <= (1 + error if busy else MOST_SPREAD):
            return ()
        why = f"{self}, {switches_per_s:.0f} involuntary switches a second" if lost else self
        return (
            f"{'machine busy' if busy else 'unsteady'} ({why}), times vary by x {spread:.2g}; "
            f"measure again while nothing else runs",
        )


def busy_beside(workers: int, cores: int, load: float, error: float) -> str:
    """The message that other work ran beside the workers, and a prediction is wrong by ``error``.

    Empty if none did, or predictions err as much on an idle machine.

    >>> busy_beside(2, 2, 6.25, -0.2), busy_beside(2, 2, 6.25, 0.02), busy_beside(2, 2, 2.4, -0.2)
    ('machine busy (load 6.2 with 2 workers on 2 cores)', '', '')
    """
    usual = SHARED_CORES_ERROR if workers > cores else PREDICTION_ERROR
    words = f"machine busy (load {load:.1f} with {workers} workers on {cores} cores)"
    return words if load > workers + 1 and abs(error) > usual else ""
