"""Which relaxed plans stay within a time: a dynamic program over layers and devices left."""

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.plan.bound_headroom import busy_in_memory_s, traffic_s
from penstock.plan.bound_steps import (
    FRONT,
    IDLE,
    SPREADS,
    WIDTHS,
    busy_below_s,
    hosts_after,
    hub_load,
    insert,
    keeps_to,
    least_rows,
    message_s,
    messages_at,
    overlap_rows,
    there_and_back_s,
    trips_below,
    widest_of,
    width_of,
)
from penstock.plan.run_tables import Floats

__all__ = ["FRONT", "SPREADS", "WIDTHS", "compiled_reach", "reach"]

Integers = NDArray[np.int64]


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
