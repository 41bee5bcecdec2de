"""What the bound's program asks at each step from stage to stage."""

import numpy as np
from numpy.typing import NDArray

from penstock.plan.bound_headroom import busy_in_memory_s, traffic_s
from penstock.plan.run_tables import Floats

__all__ = [
    "FRONT",
    "FRONT_OF_MANY",
    "IDLE",
    "SPREADS",
    "WIDTHS",
    "Chain",
    "Offers",
    "are_left",
    "busy_below_s",
    "hosts_after",
    "hub_load",
    "insert",
    "keeps_to",
    "least_rows",
    "message_s",
    "messages_at",
    "overlap_rows",
    "there_and_back_s",
    "trips_below",
    "until_drained_s",
    "widest_of",
    "width_of",
]

Integers = NDArray[np.int64]

Chain = tuple[Floats, Floats, Integers, Floats]
"""Sums of times over the first layers, messages at each cut, the last layer that reads them, and
seconds per byte there and back of pairs of devices: what every stage is asked of."""

Offers = tuple[Integers, Integers, Floats, Integers]
"""For every option of devices its step in the states, digits of the supply, figures and place."""

FRONT, FRONT_OF_MANY = 8, 4
"""Points kept of each front, and on many devices; more are merged into points below them, which
only lowers bounds."""

WIDTHS = 4
"""The last stage's replicas are told apart as 1, 2, 3 to 4, and more."""

SPREADS = 4
"""Hosts in use are counted up to this; more count as all of them."""


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


def overlap_rows(rows: float, senders: int, receivers: int) -> float:
    """Mean over rows of the rows that travel with one, between so many replicas.

    Contiguous slices make at most ``senders + receivers - 1`` messages, and the mean of a row's
    message is least where all are equal.
    """
    return max(1.0, rows / (senders + receivers - 1))


def message_s(size: Floats, rows: float, latency_s: float, s_per_byte: float) -> float:
    """Seconds of one message."""
    return size[2] * latency_s + (size[0] + size[1] * rows) * s_per_byte


def there_and_back_s(near: Floats, cut: int, rows: float, latency_s: float, pairs: Floats) -> float:
    """Least seconds of a message down and its gradient up, between one pair of devices."""
    least_s = np.inf
    for k in range(pairs.shape[0]):
        down_s = message_s(near[0, cut], rows, latency_s, pairs[k, 0])
        least_s = min(least_s, down_s + message_s(near[1, cut], rows, latency_s, pairs[k, 1]))
    return least_s


def messages_at(
    near: Floats,
    cut: int,
    overlap: float,
    rows: float,
    crossing: int,
    latency_s: float,
    s_per_byte: float,
    pairs: Floats,
) -> tuple[float, float, float]:
    """Least seconds of a row's message down and up, and of all rows through a port if crossing."""
    down_s = message_s(near[0, cut], overlap, latency_s, s_per_byte)
    up_s = message_s(near[1, cut], overlap, latency_s, s_per_byte)
    if crossing:
        return down_s, up_s, message_s(near[0, cut], rows, latency_s, s_per_byte)
    both_s = there_and_back_s(near, cut, overlap, latency_s, pairs)
    return down_s, max(up_s, both_s - down_s), 0.0


def keeps_to(
    limit_s: float,
    entry: Floats,
    first_s: float,
    trip_s: float,
    thin_s: float,
    sent_s: float,
    last_s: float,
) -> bool:
    """Whether all terms of `headroom` stay within a time for a stage reached like this.

    A, A + W, a (without the message to this stage, which is in the terms), w' and w of `headroom`.
    """
    drain_s = trip_s - first_s
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


def least_rows(rows: float, limit_s: float, replicas: int, own: Floats, per_speed: float) -> float:
    """The fewest rows of any replica, as none may have so many that it exceeds ``limit_s``."""
    if replicas == 1:
        return rows
    row_s = (own[1] + own[3]) * per_speed
    if row_s <= 0:
        return 1.0
    most = np.floor((limit_s - (own[0] + own[2]) * per_speed) / row_s * (1 + 1e-9))
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


def insert(
    points: Floats, parents: Integers, count: int, point: Floats, parent: int, option: int
) -> int:
    """Add a point to a front of smallest points; the new number of points."""
    kept = 0
    for i in range(count):
        other = points[i]
        if (other <= point).all():
            return count
    for i in range(count):
        other = points[i]
        if not (point <= other).all():
            points[kept] = other
            parents[kept] = parents[i]
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
        distance = np.abs(points[i] - point).sum()
        if distance < least:
            nearest, least = i, distance
    points[nearest] = np.minimum(points[nearest], point)
    parents[nearest, 0], parents[nearest, 1] = parent, option
    return kept


def are_left(taken: Integers, option: int, left: Integers, state: int) -> bool:
    """Whether the devices of an option are among those left, both as digits of the supply."""
    fits = True
    for digit in range(taken.shape[1]):
        if taken[option, digit] > left[state, digit]:
            fits = False
    return fits


def trips_below(
    below: Floats,
    table: Floats,
    offers: Offers,
    left: Integers,
    most_used: Integers,
    chain: Chain,
    question: Floats,
    limit_s: float,
) -> None:
    """``below[lo, state, width]``: least mean time of rows through layers from ``lo`` on and back.

    On devices that are left in ``state``, after a stage of that width, in stages that by
    themselves stay within ``limit_s``; infinite where there are none.
    """
    offsets, taken, figures, _ = offers
    times, near, reader, pairs = chain
    rows, layers, states = question[1], times.shape[1] - 1, left.shape[0]
    ends, seconds, count = np.empty(layers, dtype=np.int64), np.empty(layers), 0
    below[:] = np.inf
    below[layers] = 0.0
    for lo in range(layers - 1, 0, -1):
        for option in range(offsets.shape[0]):
            replicas = int(figures[option, 8])
            into = width_of(replicas)
            count = 0
            for hi in range(lo + 1, layers + 1):
                whole_s = times[0, hi] - times[0, lo] + times[2, hi] - times[2, lo]
                whole_s *= figures[option, 2]
                row_s = times[1, hi] - times[1, lo] + times[3, hi] - times[3, lo]
                whole_s += row_s * figures[option, 0]
                if question[0] * whole_s > limit_s:
                    break
                if keeps_to(limit_s, table[option, lo, hi], 0.0, 0.0, 0.0, 0.0, 0.0):
                    ends[count], seconds[count] = hi, whole_s
                    count += 1
            if count == 0:
                continue
            for state in range(states - offsets[option]):
                if not are_left(taken, option, left, state):
                    continue
                target = state + offsets[option]
                least_s, least_far_s = np.inf, np.inf
                for k in range(count):
                    through_s = seconds[k] + below[ends[k], target, into]
                    if reader[lo] < ends[k]:
                        least_s = min(least_s, through_s)
                    else:
                        least_far_s = min(least_far_s, through_s)
                for width in range(WIDTHS):
                    overlap = overlap_rows(rows, widest_of(width, most_used[state]), replicas)
                    both_s = there_and_back_s(near, lo, overlap, question[2], pairs)
                    through_s = min(least_s + both_s, least_far_s)
                    below[lo, state, width] = min(below[lo, state, width], through_s)


def busy_below_s(
    batches: float, rows: float, replicas: float, whole_s: float, below_s: float, entry: Floats
) -> float:
    """`busy_in_memory_s` where all replicas have as many rows: else a mean is not that of each."""
    if replicas != 1 and replicas != rows:
        return 0.0
    return busy_in_memory_s(batches, whole_s, below_s, entry[13], entry[11], entry[12])


def until_drained_s(
    batches: float, forward_s: float, whole_s: float, below_s: float, late_s: float, pace_s: float
) -> float:
    """Least seconds of a device from its first forward to its last backward, for want of gradients.

    Until ``below_s`` after its first forward it has nothing but forwards to compute, and no more
    of these than the stages before it have passed on: the k-th starts no sooner than ``(k - 1) *
    pace_s`` after the first could, ``late_s`` before the first does. All other work follows.
    """
    ready = batches
    if pace_s > 0:
        ready = min(batches, 1 + (late_s + below_s) / pace_s)
    return forward_s + below_s + batches * whole_s - ready * forward_s


def hub_load(
    point: Floats,
    lo: int,
    hi: int,
    producer: int,
    reader: Integers,
    size: Floats,
    sent_s: float,
    figures: Floats,
    question: Floats,
) -> tuple[float, float]:
    """Until when the stage of the tensor with many readers sends, and how long for each reader.

    It sends the tensor once to each stage that reads it, through the same engines as all else.
    ``sent_s``: when it has sent and reduced everything once, the tensor to a single stage, as the
    table has it. Stages from ``lo`` to ``hi`` follow.
    """
    layers = reader.shape[0] - 1
    if producer < 0 or hi <= producer:
        return 0.0, 0.0
    if lo <= producer:
        if reader[hi] >= layers:
            return 0.0, 0.0
        each_s = traffic_s(size, question[1], question[2], figures[10], figures[6])
        return sent_s - question[0] * each_s, question[0] * each_s
    if reader[lo] < hi:
        return point[4] + point[5], point[5]
    return point[4], point[5]
