"""What a stage of a relaxed plan may stand on: how many devices of which kind, at best."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import ceil, floor, prod

import numpy as np
from numpy.typing import NDArray

from penstock.bounds.links import LinkLimits, links_to_others
from penstock.bounds.placements import (
    MOST_TRIED,
    Placement,
    Placements,
    best_placements,
    placements_by_class,
)
from penstock.cluster.cluster import Cluster

__all__ = ["DeviceClass", "Option", "Supply", "device_supply", "options_of"]

MOST_STATES = 400
"""Above so many different remainders of devices, unequal devices count by their speed alone."""

SINGLE_COUNTS = 16
"""Replica counts up to this are told apart; larger ones in groups at most a quarter wide."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Equal devices of a cluster; ``units`` is what one of them takes of the supply."""

    speed: float
    memory_bytes: float
    count: int
    units: int = 1


@dataclass(frozen=True)
class Supply:
    """What all stages together may use: so many of each class, or so many units of speed.

    ``by_speed``: classes are not told apart, ``totals`` has one entry, the sum of the speeds in
    ``unit_speed``; a stage then needs no whole devices, which only makes the bound lower.
    """

    classes: tuple[DeviceClass, ...]
    totals: tuple[int, ...]
    by_speed: bool = False
    unit_speed: float = 1.0
    placements: Placements = field(default_factory=dict[tuple[int, ...], tuple[Placement, ...]])

    @property
    def strides(self) -> tuple[int, ...]:
        """Of a number that has one digit for each entry of ``totals``."""
        return tuple(prod(n + 1 for n in self.totals[i + 1 :]) for i in range(len(self.totals)))

    @property
    def states(self) -> int:
        """How many remainders there are."""
        return prod(n + 1 for n in self.totals)


@dataclass(frozen=True)
class Option:
    """``taken`` of the supply for one stage; times per row and bytes are the best of any such set.

    ``row_s``: seconds of a row of unit cost, averaged over the rows of a micro-batch, because a
    row on replica ``d`` waits for the ``n_d`` rows there: at least ``b / sum of speeds``.
    ``slowest_row_s``: the same for the slowest replica, which has whole rows. ``rows_least``: rows
    of the fullest replica.
    """

    taken: tuple[int, ...]
    replicas: int
    most_replicas: int
    fastest: float
    total_speed: float
    row_s: float
    slowest_row_s: float
    rows_least: int
    memory_bytes: float
    placement: Placement


def device_supply(cluster: Cluster, limits: LinkLimits) -> Supply:
    """The devices of ``cluster`` by class, or by speed where that makes too many states."""
    kinds: dict[tuple[float, float], int] = {}
    for device in cluster.devices:
        key = (device.speed, device.memory_bytes)
        kinds[key] = kinds.get(key, 0) + 1
    speeds = {speed for speed, _ in kinds}
    if prod(n + 1 for n in kinds.values()) > MOST_STATES and len(kinds) > len(speeds):
        # Devices that differ in memory alone count as if all of a speed had the most.
        kinds = {
            (speed, max(m for s, m in kinds if s == speed)): sum(
                n for (s, _), n in kinds.items() if s == speed
            )
            for speed in speeds
        }
    classes = tuple(DeviceClass(*kind, count) for kind, count in sorted(kinds.items()))
    if len(classes) == 1 or prod(c.count + 1 for c in classes) <= MOST_STATES:
        return Supply(
            classes,
            tuple(c.count for c in classes),
            placements=known_placements(cluster, classes, limits),
        )
    unit = min(c.speed for c in classes)
    total = floor(sum(c.speed * c.count for c in classes) / unit + 1e-9)
    return Supply(classes, (total,), by_speed=True, unit_speed=unit)


def known_placements(
    cluster: Cluster, classes: tuple[DeviceClass, ...], limits: LinkLimits
) -> Placements:
    """The placements of a cluster that is small, and whose links are not all the same."""
    rates, _ = links_to_others(cluster)
    unequal = len(np.unique(rates[~np.eye(len(rates), dtype=bool)])) > 1
    if not unequal or not 2 < len(cluster.devices) <= MOST_TRIED:
        return {}
    class_of = {
        (one.speed, memory): index
        for index, one in enumerate(classes)
        for memory in {device.memory_bytes for device in cluster.devices}
        if memory == one.memory_bytes or sum(other.speed == one.speed for other in classes) == 1
    }
    members = [class_of[device.speed, device.memory_bytes] for device in cluster.devices]
    return placements_by_class(cluster, members, limits.host_devices > 0)


def options_of(supply: Supply, limits: LinkLimits, rows: int) -> tuple[Option, ...]:
    """Every way to take devices for a stage, for micro-batches of ``rows`` samples.

    A replica needs a row, so there are at most ``rows`` of them. Large numbers of replicas are
    grouped: charged as few devices as any of the group, timed as the most.
    """
    found: list[Option] = []
    for speeds, taken, fewest, most, memory in device_sets(supply, rows):
        known = supply.placements.get(taken) if fewest == most else None
        for placement in known or best_placements(limits, fewest, most):
            found.append(
                Option(
                    taken=taken,
                    replicas=fewest,
                    most_replicas=most,
                    fastest=max(speeds),
                    total_speed=sum(speeds),
                    row_s=rows / sum(speeds) if supply.by_speed else mean_row_s(speeds, rows),
                    slowest_row_s=rows / sum(speeds)
                    if supply.by_speed
                    else least_slowest(speeds, rows),
                    rows_least=ceil(rows / most),
                    memory_bytes=memory,
                    placement=placement,
                )
            )
    return tuple(found)


def device_sets(
    supply: Supply, rows: int
) -> Iterator[tuple[list[float], tuple[int, ...], int, int, float]]:
    """Speeds, what is taken, fewest and most replicas, and memory of every set of devices."""
    classes = supply.classes
    if supply.by_speed:
        fastest = max(c.speed for c in classes)
        memory = max(c.memory_bytes for c in classes)
        for units in range(1, supply.totals[0] + 1):
            speed = (units + 1 - 1e-9) * supply.unit_speed
            fewest = max(1, ceil(units * supply.unit_speed / fastest - 1e-9))
            if fewest <= rows:
                whole, rest = divmod(speed, fastest)
                speeds = [fastest] * int(whole) + ([rest] if rest > 1e-12 else [])
                yield speeds, (units,), fewest, max(fewest, min(rows, units + 1)), memory
    elif len(classes) == 1:
        only = classes[0]
        for fewest, most in count_groups(min(only.count, rows), rows):
            yield [only.speed] * most, (fewest,), fewest, most, only.memory_bytes
    else:
        for taken in product(*(range(c.count + 1) for c in classes)):
            if 0 < sum(taken) <= rows:
                speeds = [c.speed for c, n in zip(classes, taken, strict=True) for _ in range(n)]
                memory = max(c.memory_bytes for c, n in zip(classes, taken, strict=True) if n)
                yield speeds, taken, sum(taken), sum(taken), memory


def count_groups(most: int, rows: int) -> Iterator[tuple[int, int]]:
    """Replica counts 1 to ``most`` in groups; the fullest replica has as many rows in a group."""
    fewest = 1
    while fewest <= most:
        last = fewest
        if fewest > SINGLE_COUNTS:
            full = ceil(rows / fewest)
            same = (rows - 1) // (full - 1) if full > 1 else most
            last = min(most, same, fewest + fewest // 4)
        yield fewest, last
        fewest = last + 1


def mean_row_s(speeds: list[float], rows: int) -> float:
    """Least mean over the rows of ``rows on its replica / speed``.

    >>> mean_row_s([1.0, 1.0], 3)
    1.6666666666666667
    """
    if max(speeds) == min(speeds) and len(speeds) <= rows:
        full, more = divmod(rows, len(speeds))
        squares = more * (full + 1) ** 2 + (len(speeds) - more) * full**2
        return squares / rows / speeds[0]
    return rows / sum(speeds)


def least_slowest(speeds: list[float], rows: int) -> float:
    """Least ``max over replicas of rows / speed`` over all splits into whole rows.

    >>> least_slowest([1.0, 0.5], 4)
    3.0
    """
    if max(speeds) == min(speeds):
        return ceil(rows / len(speeds)) / speeds[0]
    values = np.array(sorted(speeds, reverse=True))
    share: NDArray[np.float64] = np.floor(rows * values / values.sum() + 1e-12)
    for _ in range(rows - int(share.sum())):
        share[int(((share + 1) / values).argmin())] += 1
    return float((share / values).max())
