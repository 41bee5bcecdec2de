"""Other programs on this machine, and how much longer its work takes because of them."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from penstock.cluster.cluster import Cluster, with_devices
from penstock.profile.model_profile import ModelProfile

MOST_SPREAD = 1.5
"""Ratio of the slowest of a few repeats to the fastest that an idle machine stays below."""


class Spread:
    """The slowest of repeats of the same work, relative to the fastest."""

    def __init__(self) -> None:
        self._least_s, self._most_s = 0.0, 0.0

    def add(self, repeats: Sequence[float]) -> None:
        """Add the seconds that the same work took, time after time."""
        self._least_s += min(repeats)
        self._most_s += max(repeats)

    def warnings(self) -> tuple[str, ...]:
        """A line that says that the times cannot be trusted; empty if they can."""
        spread = self._most_s / (self._least_s or 1.0)
        if spread <= MOST_SPREAD:
            return ()
        return (f"unsteady: times vary by x {spread:.2g}; measure again while nothing else runs",)


def other_load(
    before: tuple[float, float], after: tuple[float, float], workers: int, cores: int
) -> float:
    """The share by which work takes longer because of other programs.

    ``before`` and ``after`` are those of `penstock.machine.core_seconds` for a thread. More workers
    of one run than there are cores wait for one another, which is not counted.

    >>> other_load((1.0, 0.0), (5.0, 1.0), workers=2, cores=2)
    0.25
    >>> other_load((1.0, 0.0), (5.0, 4.0), workers=4, cores=2)
    0.0
    """
    ran_s, waited_s = after[0] - before[0], after[1] - before[1]
    if not ran_s:
        return 0.0
    return max(0.0, (1 + waited_s / ran_s) / max(1.0, workers / cores) - 1)


def slowed(cluster: Cluster, profile: ModelProfile, ranks: int) -> Cluster:
    """The cluster with devices as slow as in the steps of ``ranks`` ranks.

    Other programs slow all of them down as while the profile was measured. And in each step ranks
    wait for the slowest of them, whose seconds are those expected of the largest of ``ranks``
    normal numbers. (G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958.)
    """
    above_mean = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    slower = (1 + profile.other_load) * (1 + above_mean * profile.variation)
    return with_devices(cluster, lambda one: replace(one, speed=one.speed / slower))
