"""What the bound's program asks at each step from stage to stage."""

import numpy as np
from numpy.typing import NDArray

from penstock.plan.run_tables import Floats

__all__ = [
    "FINE_FRONT",
    "FRONT",
    "FRONT_OF_MANY",
    "HUB",
    "IDLE",
    "POINT",
    "SPREADS",
    "WIDTHS",
    "Chain",
    "Offers",
    "Table",
    "are_left",
    "fill_own",
    "hosts_after",
    "insert",
    "is_below",
    "keeps_to",
    "least_rows",
    "widest_of",
    "width_of",
]

Integers = NDArray[np.int64]

Chain = tuple[Floats, Floats, Integers, Integers, Floats, Floats]
"""Sums of times over the first layers; messages at each cut, the layer by which they are read, and
what passes it (see `penstock.bounds.tables.NearTensors`); seconds per byte there and back of
pairs of devices; and all that every run of layers takes in and sends: what every stage is asked
of."""

Table = tuple[Integers, Floats]
"""``runs[option]`` and ``table`` of `penstock.bounds.headroom.headroom`."""

Offers = tuple[Integers, Integers, Floats, Integers]
"""For every option of devices its step in the states, digits of the supply, figures and place."""

FRONT, FRONT_OF_MANY, FINE_FRONT = 16, 1, 48
"""Points kept of each front, on many devices, and where it is worth it; more are merged into points
below them, which only lowers bounds."""

WIDTHS = 4
"""The last stage's replicas are told apart as 1, 2, 3 to 4, and more."""

SPREADS = 4
"""Hosts in use are counted up to this; more count as all of them."""


POINT, HUB = 16, 11
"""How many figures a point has, and the first of those of `penstock.bounds.stage.hub_loads`:

    0 to 4      A, A + W, a, w' and W of `penstock.bounds.headroom.headroom`
    5, 6        when the last forward is done, and until when some stage sends activations
    7, 8        the pace of forwards, and the a from which it counts
    9, 10       whether the last stage has several layers, and its fewest rows of a replica
    11 to 15    loads of the stage whose tensor many stages read
"""

IDLE = -2
"""The parent of a point that only leaves a device idle: it is there to show others needless."""


def width_of(replicas: int) -> int:
    """The class of a number of replicas."""
    if replicas <= 2:
        return replicas - 1
    return 2 if replicas <= 4 else 3


def widest_of(width: int, devices: int) -> int:
    """The most replicas of a class, when so many devices are in use."""
    if width == 3:
        return max(1, devices)
    return 1 << width


def fill_own(own: Floats, times: Floats, lo: int, hi: int) -> None:
    """Fill in what layers from ``lo`` to ``hi`` take: an array made once is quicker than many."""
    for k in range(4):
        own[k] = times[k, hi] - times[k, lo]


def keeps_to(
    limit_s: float,
    entry: Floats,
    first_s: float,
    trip_s: float,
    drain_s: float,
    thin_s: float,
    sent_s: float,
    last_s: float,
) -> bool:
    """Whether all terms of `headroom` stay within a time for a stage reached like this.

    A, A + W, W, a (without the message to this stage, which is in the terms), w' and w of
    `headroom`.
    """
    return (
        entry[0] <= limit_s
        and first_s + entry[1] <= limit_s
        and trip_s + entry[2] <= limit_s
        and drain_s + entry[3] <= limit_s
        and drain_s + thin_s + entry[4] <= limit_s
        and thin_s + entry[5] <= limit_s
        and thin_s + last_s + entry[6] <= limit_s
        and last_s + entry[7] <= limit_s
        and first_s + sent_s + entry[8] <= limit_s
    )


def least_rows(
    own: Floats,
    entry: Floats,
    traffic: Floats,
    figures: Floats,
    question: Floats,
    limit_s: float,
    before_s: float,
    after_s: float,
) -> float:
    """The fewest rows of any replica, as none may have so many that it exceeds ``limit_s``.

    By its compute and by what it sends, which start ``before_s`` later, and by what it takes in,
    some of which may come sooner; all end ``after_s`` earlier, messages before the all-reduce. On
    many devices whatever is possible.
    """
    batches, rows, replicas = question[0], question[1], int(figures[8])
    if replicas == 1 or question[9] > 0:
        return rows if replicas == 1 else 1.0
    most, left_s = rows - replicas + 1, limit_s - max(after_s, entry[16])
    row_s = batches * (own[1] + own[3]) * figures[2]
    in_s = batches * (traffic[0, 1] + traffic[1, 1]) / figures[9]
    out_s = batches * traffic[2, 1] / figures[10]
    if row_s > 0:
        fixed_s = batches * (own[0] + own[2]) * figures[2]
        most = min(most, (limit_s - before_s - after_s - fixed_s) / row_s)
    if in_s > 0:
        most = min(most, left_s / in_s)
    if out_s > 0:
        most = min(most, (left_s - before_s) / out_s)
    most = np.floor(most * (1 + 1e-9))
    return max(1.0, min(rows // replicas, rows - (replicas - 1) * most))


def hosts_after(
    joined: int, crossing: int, place: int, replicas: int, first: bool, room: Integers, used: int
) -> int:
    """One less than the hosts in use after a further stage; -1 where they have no room for it.

    A stage inside a host stands on one in use or, ``crossing``, on another; one across hosts
    brings up to as many as it has replicas. More than ``room`` tells apart are as good as all.
    """
    most = room.shape[0] - 1
    if crossing and (place != 0 or first or joined == most):
        return -1
    now = joined + crossing
    if place == 1:
        now = min(most, joined + replicas - 1)
    return now if used <= room[now] else -1


def is_below(one: Floats, other: Floats) -> bool:
    """Whether no figure of a point is above that of another."""
    for k in range(one.shape[0]):  # noqa: SIM110
        if one[k] > other[k]:
            return False
    return True


def insert(
    points: Floats, parents: Integers, count: int, point: Floats, parent: int, option: int
) -> int:
    """Add a point to a front of smallest points; the new number of points."""
    for i in range(count):
        if is_below(points[i], point):
            return count
    kept = 0
    for i in range(count):
        if not is_below(point, points[i]):
            if kept < i:
                points[kept], parents[kept] = points[i], parents[i]
            kept += 1
    if kept < points.shape[0]:
        points[kept] = point
        parents[kept, 0], parents[kept, 1] = parent, option
        return kept + 1
    if parent == IDLE:
        return kept
    # Full: the nearest point comes down to where it is below both.
    nearest, least = 0, np.inf
    for i in range(kept):
        distance = 0.0
        for k in range(point.shape[0]):
            distance += abs(points[i, k] - point[k])
        if distance < least:
            nearest, least = i, distance
    for k in range(point.shape[0]):
        points[nearest, k] = min(points[nearest, k], point[k])
    parents[nearest, 0], parents[nearest, 1] = parent, option
    return kept


def are_left(taken: Integers, option: int, left: Integers, state: int) -> bool:
    """Whether the devices of an option are among those left, both as digits of the supply."""
    fits = True
    for digit in range(taken.shape[1]):
        if taken[option, digit] > left[state, digit]:
            fits = False
    return fits
