"""Which relaxed plans stay within a time: a dynamic program over layers and devices left."""

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.plan.bound_headroom import busy_in_memory_s, traffic_s
from penstock.plan.run_tables import Floats

__all__ = ["FRONT", "SPREADS", "WIDTHS", "compiled_reach", "reach"]

Integers = NDArray[np.int64]

FRONT = 4
"""Points kept of each front; more are merged into points below them, which only lowers bounds."""

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
    if kept < FRONT:
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


def trips_below(
    below: Floats,
    table: Floats,
    offsets: Integers,
    taken: Integers,
    figures: Floats,
    left: Integers,
    most_used: Integers,
    times: Floats,
    near: Floats,
    reader: Integers,
    pairs: Floats,
    question: Floats,
    limit_s: float,
) -> None:
    """``below[lo, state, width]``: least mean time of rows through layers from ``lo`` on and back.

    On devices that are left in ``state``, after a stage of that width, in stages that by
    themselves stay within ``limit_s``; infinite where there are none.
    """
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
                fits = True
                for digit in range(taken.shape[1]):
                    if taken[option, digit] > left[state, digit]:
                        fits = False
                if not fits:
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


def reach(
    below: Floats,
    counts: Integers,
    points: Floats,
    parents: Integers,
    table: Floats,
    offsets: Integers,
    taken: Integers,
    figures: Floats,
    places: Integers,
    left: Integers,
    used: Integers,
    most_used: Integers,
    steps: Integers,
    room: Integers,
    times: Floats,
    near: Floats,
    reader: Integers,
    pairs: Floats,
    hub_reader: Integers,
    hub_size: Floats,
    capacity: Floats,
    question: Floats,
    limit_s: float,
) -> int:
    """The index of a point of a relaxed plan that takes no longer than ``limit_s``, or -1.

    ``points[lo, state, joined, width]``: the least (A, A + W, a, w') of `headroom` with which
    layers before ``lo`` can run on the devices taken in ``state``, which are on ``joined + 1``
    hosts, the last stage ``width`` wide. ``left[state]``: digits of the supply left,
    ``used[state]`` the fewest devices taken and ``most_used[state]`` the most, ``steps`` the
    strides of the digits; ``room[joined]``: the most devices of so many hosts;
    ``places[option]``: 0 inside one host, 1 across hosts, 2 does not matter; ``pairs``: seconds
    per byte there and back. ``question``: micro-batches, rows, latency, seconds per byte, latency
    and seconds per byte between hosts, most stages, least over most speed, and the layer that
    makes the tensor with many readers: the last two figures of a point are until when its stage
    sends, and how much longer for each further stage that reads it.
    """
    batches, rows = question[0], question[1]
    layers = times.shape[1] - 1
    states = left.shape[0]
    trips_below(
        below,
        table,
        offsets,
        taken,
        figures,
        left,
        most_used,
        times,
        near,
        reader,
        pairs,
        question,
        limit_s,
    )
    counts[:] = 0
    point = np.zeros(6)
    spread = room.shape[0]
    counts[0, 0, 0, 0] = 1
    points[0, 0, 0, 0, 0, :] = 0.0
    parents[0, 0, 0, 0, 0] = -1
    for lo in range(layers):
        rest_row = times[1, layers] + times[3, layers] - times[1, lo] - times[3, lo]
        rest_fixed = times[0, layers] + times[2, layers] - times[0, lo] - times[2, lo]
        for state in range(states):
            if lo == 0 and state > 0:
                break
            rest_s = batches * (rest_row * rows + rest_fixed * question[7])
            for joined in range(spread):
                for width in range(WIDTHS):
                    here = counts[lo, state, joined, width]
                    if here == 0:
                        continue
                    front = points[lo, state, joined, width]
                    origin = parents[lo, state, joined, width]
                    for digit in range(steps.shape[0]):
                        # Devices may stay idle: then only what beats this is worth going on from.
                        if left[state, digit] > 0 and lo > 0:
                            idle = state + steps[digit]
                            for k in range(here):
                                point[:] = front[k]
                                counts[lo, idle, joined, width] = insert(
                                    points[lo, idle, joined, width],
                                    parents[lo, idle, joined, width],
                                    counts[lo, idle, joined, width],
                                    point,
                                    IDLE,
                                    0,
                                )
                    for k in range(here):
                        if origin[k, 0] == IDLE:
                            continue
                        if front[k, 1] * capacity[state] + rest_s > limit_s * capacity[state]:
                            continue
                        index = (
                            ((lo * states + state) * spread + joined) * WIDTHS + width
                        ) * FRONT + k
                        for option in range(offsets.shape[0]):
                            fits = True
                            for digit in range(steps.shape[0]):
                                if taken[option, digit] > left[state, digit]:
                                    fits = False
                            if not fits:
                                continue
                            target = state + offsets[option]
                            for crossing in range(2):
                                now = hosts_after(
                                    joined,
                                    crossing,
                                    places[option],
                                    int(figures[option, 7]),
                                    lo == 0,
                                    room,
                                    int(used[target]),
                                )
                                if now < 0:
                                    continue
                                latency_s = question[4] if crossing else question[2]
                                s_per_byte = question[5] if crossing else question[3]
                                overlap = overlap_rows(
                                    rows,
                                    widest_of(width, most_used[state]),
                                    int(figures[option, 8]),
                                )
                                for hi in range(lo + 1, layers + 1):
                                    own = times[:, hi] - times[:, lo]
                                    thin_s, sent_s = front[k, 2], front[k, 3]
                                    down_s, up_s, port_s = 0.0, 0.0, 0.0
                                    last_s = sent_s
                                    if lo > 0 and reader[lo] < hi:
                                        down_s, up_s, port_s = messages_at(
                                            near,
                                            lo,
                                            overlap,
                                            rows,
                                            crossing,
                                            latency_s,
                                            s_per_byte,
                                            pairs,
                                        )
                                        # Some message may be of a single row.
                                        thin_rows = rows if overlap >= rows else 1.0
                                        thin_s += message_s(
                                            near[0, lo], thin_rows, latency_s, s_per_byte
                                        )
                                        last_s += message_s(
                                            near[1, lo], thin_rows, latency_s, s_per_byte
                                        )
                                    if front[k, 2] + last_s + batches * port_s > limit_s:
                                        continue
                                    first_s = front[k, 0] + down_s
                                    trip_s = front[k, 1] + down_s + up_s
                                    forward_s = (
                                        own[0] * figures[option, 2] + own[1] * figures[option, 0]
                                    )
                                    whole_s = (
                                        forward_s
                                        + own[2] * figures[option, 2]
                                        + own[3] * figures[option, 0]
                                    )
                                    if trip_s + batches * whole_s > limit_s:
                                        break
                                    entry = table[option, lo, hi]
                                    if not keeps_to(
                                        limit_s,
                                        entry,
                                        first_s,
                                        trip_s,
                                        front[k, 2],
                                        sent_s,
                                        last_s,
                                    ):
                                        continue
                                    if hi < layers and question[6] == 1:
                                        continue
                                    into = width_of(int(figures[option, 8]))
                                    below_s = below[hi, target, into]
                                    if trip_s + whole_s + below_s > limit_s:
                                        continue
                                    busy_s = busy_below_s(
                                        batches, rows, figures[option, 8], whole_s, below_s, entry
                                    )
                                    if trip_s + busy_s > limit_s:
                                        continue
                                    sends_s, each_s = hub_load(
                                        front[k],
                                        lo,
                                        hi,
                                        int(question[8]),
                                        hub_reader,
                                        hub_size,
                                        first_s + entry[14],
                                        figures[option],
                                        question,
                                    )
                                    if sends_s > limit_s:
                                        continue
                                    if hi == layers:
                                        parents[layers, target, now, 0, 0, 0] = index
                                        parents[layers, target, now, 0, 0, 1] = option
                                        return (
                                            ((layers * states + target) * spread + now)
                                            * WIDTHS
                                            * FRONT
                                        )
                                    fewest = least_rows(
                                        rows,
                                        limit_s / batches,
                                        int(figures[option, 8]),
                                        own,
                                        figures[option, 2],
                                    )
                                    point[0] = first_s + forward_s
                                    point[1] = point[0] + max(
                                        entry[9], whole_s - forward_s + trip_s - first_s
                                    )
                                    point[2] = (
                                        thin_s + (own[0] + own[1] * fewest) * figures[option, 2]
                                    )
                                    point[3] = max(
                                        entry[10],
                                        last_s + (own[2] + own[3] * fewest) * figures[option, 2],
                                    )
                                    point[4], point[5] = sends_s, each_s
                                    counts[hi, target, now, into] = insert(
                                        points[hi, target, now, into],
                                        parents[hi, target, now, into],
                                        counts[hi, target, now, into],
                                        point,
                                        index,
                                        option,
                                    )
    return -1


@cache
def compiled_reach() -> Callable[..., int]:
    """`reach` as machine code; kept on disk, so that only the first call ever compiles it."""
    import numba
    from numba.extending import register_jitable

    for helper in (
        width_of,
        widest_of,
        overlap_rows,
        message_s,
        there_and_back_s,
        messages_at,
        keeps_to,
        least_rows,
        hosts_after,
        insert,
        busy_in_memory_s,
        busy_below_s,
        hub_load,
        traffic_s,
        trips_below,
    ):
        register_jitable(helper)
    return cast("Callable[..., int]", numba.njit(cache=True)(reach))
