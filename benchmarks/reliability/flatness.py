"""Test that the figures of a soak stay flat."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

WARM_UP_S = 600.0
"""Samples before are not looked at: caches fill."""

BOUNDS = {
    "parent_bytes": 16 << 20,
    "parent_handles": 4.0,
    "parent_threads": 2.0,
    "server_bytes": 16 << 20,
    "server_handles": 4.0,
    "server_threads": 2.0,
    "processes": 1.0,
    "shared_memory_names": 1.0,
    "temporary_names": 1.0,
    "run_bytes": 1 << 20,
}
"""The most that each figure may grow in an hour."""

SURE = 1.96
"""Standard errors on each side of a slope that hold it with 95 %."""


@dataclass(frozen=True)
class Trend:
    """Change of a figure in an hour, with an interval that holds it with 95 %."""

    name: str
    mean: float
    largest: float
    per_hour: float
    low: float
    high: float
    bound: float

    @property
    def is_flat(self) -> bool:
        """Return whether the growth stays below the bound."""
        return self.high <= self.bound


def trends_of(samples: Sequence[Mapping[str, Any]]) -> list[Trend]:
    """The trend of each figure after the warm-up, while a life has all of its processes.

    A life that begins on a busy machine holds little for a minute. That would look like growth.
    """
    late = [sample for sample in started(samples) if sample["at_s"] >= WARM_UP_S]
    return [trend_of(name, late) for name in BOUNDS]


def started(samples: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The samples of each life from the first with as many processes as there are at most."""
    most = max((sample["processes"] for sample in samples), default=0)
    begun: set[int] = set()
    for sample in samples:
        if sample["processes"] == most:
            begun.add(sample["life"])
        if sample["life"] in begun:
            yield sample


def trend_of(name: str, samples: Sequence[Mapping[str, Any]]) -> Trend:
    """The trend of one figure: one slope for all lives of the first process.

    A life begins at a level of its own. Each minute is one point, for samples within a minute
    depend on one another, and so does what a fault takes for some seconds.
    """
    minutes: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        minutes[sample["life"], int(sample["at_s"] // 60)].append(sample[name])
    lives: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (life, minute), values in minutes.items():
        lives[life].append((minute / 60, sum(values) / len(values)))
    points = [
        (at - sum(x for x, _ in own) / len(own), value - sum(y for _, y in own) / len(own))
        for own in lives.values()
        for at, value in own
    ]
    every = [sample[name] for sample in samples] or [0.0]
    slope, error = fitted(points, len(points) - len(lives) - 1)
    mean, largest = sum(every) / len(every), max(every)
    low, high = slope - SURE * error, slope + SURE * error
    return Trend(name, mean, largest, slope, low, high, BOUNDS[name])


def fitted(points: Sequence[tuple[float, float]], freedom: int) -> tuple[float, float]:
    """The slope through the origin with the least squares, and its standard error."""
    spread = sum(x * x for x, _ in points)
    if not spread or freedom < 1:
        return 0.0, inf
    slope = sum(x * y for x, y in points) / spread
    rest = sum((y - slope * x) ** 2 for x, y in points)
    return slope, sqrt(rest / freedom / spread)
