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


def slowed(cluster: Cluster, profile: ModelProfile, ranks: Sequence[int]) -> Cluster:
    """The cluster with devices as slow as in the steps of ``ranks``.

    Other programs slow them down as while all ranks were measured. If a host has fewer cores than
    ranks, these share them evenly with the programs, and fewer ranks lose a larger part. And in
    each step ranks wait for the slowest of them, whose seconds are those expected of the largest of
    as many normal numbers. (G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958.)
    """
    above_mean = NormalDist().inv_cdf((len(ranks) - 0.375) / (len(ranks) + 0.25))
    speeds: list[float] = []
    for host, device in zip(cluster.host_index, cluster.devices, strict=True):
        busy = sum(cluster.host_index[rank] == host for rank in ranks)
        cores, measured = cluster.slowing_hosts.get(host, 0), len(cluster.hosts[host].devices)
        others = profile.other_load * (measured if cores else busy)
        beside = max(1.0, (busy + others) / max(cores, busy, 1))
        speeds.append(device.speed / beside / (1 + above_mean * profile.variation))
    own = iter(speeds)
    return with_devices(cluster, lambda one: replace(one, speed=next(own)))
