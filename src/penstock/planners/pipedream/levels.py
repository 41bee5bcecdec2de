"""The levels of a cluster's network, as PipeDream's dynamic program climbs them."""

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.cluster.link_matrices import link_matrices
from penstock.plan.run_tables import Floats

__all__ = ["Level", "levels_of"]


@dataclass(frozen=True, slots=True)
class Level:
    """Units of a level: how many stand in one unit of the next level, and of how many devices.

    ``bytes_per_s`` is the slowest rate between two of them.
    """

    workers: int
    devices: int
    bytes_per_s: float


def levels_of(cluster: Cluster) -> tuple[tuple[int, ...], tuple[Level, ...]]:
    """The devices, those of a unit side by side, and the levels, lowest first.

    A level parts the devices in units of equal size, so that every link inside a unit is faster
    than every link between two: devices in hosts, hosts in racks. Where links part them in no such
    way there is one level, of all devices.

    >>> from penstock.cluster.presets import find_cluster
    >>> [level.workers for level in levels_of(find_cluster("dapple-a"))[1]]
    [8, 2]
    >>> [level.workers for level in levels_of(find_cluster("dapple-b"))[1]]
    [16]
    """
    links = link_matrices(cluster).bytes_per_s
    slower = np.minimum(links, links.T)
    order, joins = strongest_first(slower)
    slower = slower[np.ix_(order, order)]
    np.fill_diagonal(slower, inf)
    count = len(order)
    sizes = [1]
    for rate in sorted(set(joins), reverse=True):
        ends = [0, *(i + 1 for i, join in enumerate(joins) if join < rate), count]
        size = ends[1]
        if size < count and {b - a for a, b in pairwise(ends)} == {size}:
            inside = same_unit(count, size)
            if slower[inside].min() > slower[~inside].max():
                sizes.append(size)
    levels: list[Level] = []
    for size, upper in pairwise([*sizes, count] if count > 1 else [1, 1]):
        between = same_unit(count, upper) & ~same_unit(count, size)
        levels.append(Level(upper // size, size, float(slower[between].min(initial=inf))))
    return order, tuple(levels)


def same_unit(count: int, size: int) -> np.ndarray:
    """Which pairs of so many devices stand in the same unit of ``size`` devices."""
    unit = np.arange(count) // size
    return unit[:, None] == unit[None, :]


def strongest_first(rates: Floats) -> tuple[tuple[int, ...], list[float]]:
    """All devices, each next the one with the fastest link to those before it; and those rates.

    So devices that a rate joins, directly or through others, stand side by side (Prim).
    """
    order, joins = [0], list[float]()
    reached = rates[0].copy()
    left = np.ones(len(rates), dtype=bool)
    left[0] = False
    while left.any():
        nearest = int(np.where(left, reached, -1.0).argmax())
        order.append(nearest)
        joins.append(float(reached[nearest]))
        left[nearest] = False
        reached = np.maximum(reached, rates[nearest])
    return tuple(order), joins
