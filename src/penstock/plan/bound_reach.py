"""Which relaxed plans stay within a time: a dynamic program over layers and devices left."""

from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.plan.bound_headroom import busy_in_memory_s, traffic_s
from penstock.plan.bound_steps import (
    FRONT,
    FRONT_OF_MANY,
    IDLE,
    SPREADS,
    WIDTHS,
    Chain,
    Offers,
    are_left,
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
    until_drained_s,
    widest_of,
    width_of,
)
from penstock.plan.run_tables import Floats

__all__ = ["FRONT", "FRONT_OF_MANY", "SPREADS", "WIDTHS", "compiled_reach", "reach"]

Integers = NDArray[np.int64]

Fronts = tuple[Integers, Floats, Integers]
"""How many points each front has, the points, and the point and option that each came from."""

Supply = tuple[Integers, Integers, Integers, Integers, Floats]
"""What is left in every state, the fewest and the most devices in use, the room on hosts, and for
every state the most speed left."""


def arrival(
    reached: Floats,
    cut: int,
    link: tuple[int, float, float],
    overlap: float,
    near: Floats,
    pairs: Floats,
    rows: float,
) -> tuple[float, float, float, float, float]:
    """A, A + W, a and w of `headroom` for a stage that reads what the stage before it sends.

    And the seconds of all rows of a micro-batch through a port between hosts. ``link``: whether
    it leads to another host, its latency and seconds per byte.
    """
    crossing, latency_s, s_per_byte = link
    down_s, up_s, port_s = messages_at(
        near, cut, overlap, rows, crossing, latency_s, s_per_byte, pairs
    )
    # Some message may be of a single row.
    thin_rows = rows if overlap >= rows else 1.0
    thin_s = reached[2] + message_s(near[0, cut], thin_rows, latency_s, s_per_byte)
    last_s = reached[3] + message_s(near[1, cut], thin_rows, latency_s, s_per_byte)
    return reached[0] + down_s, reached[1] + down_s + up_s, thin_s, last_s, port_s


def pace_of(
    before_s: float,
    is_read_alone: bool,
    cut: int,
    link: tuple[int, float, float],
    near: Floats,
    rows: float,
    forward_s: float,
) -> float:
    """At least so many seconds lie between forwards on a device, once the stages before it work.

    As many as the slowest forward takes of any stage so far (``before_s`` before this one), or the
    message that a device takes in for each, where a single one reads it.
    """
    pace_s = max(before_s, forward_s)
    if is_read_alone:
        pace_s = max(pace_s, message_s(near[0, cut], rows, link[1], link[2]))
    return pace_s


def leave_idle(
    fronts: Fronts,
    here: tuple[int, int, int, int],
    left: Integers,
    steps: Integers,
    point: Floats,
) -> None:
    """Let one device of each kind stay idle: then only what beats this is worth going on from."""
    counts, points, parents = fronts
    lo, state, joined, width = here
    for digit in range(steps.shape[0]):
        if left[state, digit] == 0:
            continue
        idle = state + steps[digit]
        for k in range(counts[lo, state, joined, width]):
            point[:] = points[lo, state, joined, width, k]
            counts[lo, idle, joined, width] = insert(
                points[lo, idle, joined, width],
                parents[lo, idle, joined, width],
                counts[lo, idle, joined, width],
                point,
                IDLE,
                0,
            )


def add_stages(
    fronts: Fronts,
    below: Floats,
    reached: Floats,
    source: tuple[int, int],
    option: int,
    onto: tuple[int, int],
    link: tuple[int, float, float],
    overlap: float,
    table: Floats,
    figures: Floats,
    chain: Chain,
    hub: tuple[Integers, Floats],
    question: Floats,
    limit_s: float,
    point: Floats,
) -> bool:
    """Add the points of all stages that start where a point ends; whether one is the last stage.

    ``source``: the index of the point and the layer where it ends, ``onto``: the state and hosts
    after the stage.
    """
    counts, points, parents = fronts
    index, lo = source
    target, now = onto
    times, near, reader, pairs = chain
    hub_reader, hub_size = hub
    batches, rows, replicas = question[0], question[1], int(figures[option, 8])
    layers, into = times.shape[1] - 1, width_of(replicas)
    apart = (reached[0], reached[1], reached[2], reached[3], 0.0)
    joint = arrival(reached, lo, link, overlap, near, pairs, rows) if lo > 0 else apart
    for hi in range(lo + 1, layers + 1):
        own, entry = times[:, hi] - times[:, lo], table[option, lo, hi]
        first_s, trip_s, thin_s, last_s, port_s = joint if reader[lo] < hi else apart
        if reached[2] + last_s + batches * port_s > limit_s:
            continue
        forward_s = own[0] * figures[option, 2] + own[1] * figures[option, 0]
        whole_s = forward_s + own[2] * figures[option, 2] + own[3] * figures[option, 0]
        if trip_s + batches * whole_s > limit_s:
            break
        if not keeps_to(limit_s, entry, first_s, trip_s, reached[2], reached[3], last_s):
            continue
        if hi < layers and question[6] == 1:
            continue
        below_s = below[hi, target, into]
        if trip_s + whole_s + below_s > limit_s:
            continue
        read_alone = replicas == 1 and lo > 0 and reader[lo] < hi
        pace_s = pace_of(reached[6], read_alone, lo, link, near, rows, forward_s)
        busy_s = busy_below_s(batches, rows, figures[option, 8], whole_s, below_s, entry)
        if replicas == 1:
            late_s = first_s - thin_s
            drained_s = until_drained_s(batches, forward_s, whole_s, below_s, late_s, pace_s)
            busy_s = max(busy_s, drained_s)
        if trip_s + busy_s > limit_s:
            continue
        point[4], point[5] = hub_load(
            reached,
            lo,
            hi,
            int(question[8]),
            hub_reader,
            hub_size,
            first_s + entry[14],
            figures[option],
            question,
        )
        if point[4] > limit_s:
            continue
        if hi == layers:
            return True
        fewest = least_rows(rows, limit_s / batches, replicas, own, figures[option, 2])
        point[0] = first_s + forward_s
        point[1] = point[0] + max(entry[9], whole_s - forward_s + trip_s - first_s)
        point[2] = thin_s + (own[0] + own[1] * fewest) * figures[option, 2]
        point[3] = max(entry[10], last_s + (own[2] + own[3] * fewest) * figures[option, 2])
        point[6] = pace_s
        place = (hi, target, now, into)
        counts[place] = insert(points[place], parents[place], counts[place], point, index, option)
    return False


def go_on(
    fronts: Fronts,
    here: tuple[int, int, int, int],
    below: Floats,
    table: Floats,
    offers: Offers,
    supply: Supply,
    chain: Chain,
    hub: tuple[Integers, Floats],
    question: Floats,
    limit_s: float,
    rest_s: float,
    point: Floats,
) -> int:
    """Add every stage after the points of one front; the index of a point with all layers, or -1.

    ``rest_s``: what the layers that follow take one device of the greatest speed.
    """
    counts, points, parents = fronts
    offsets, taken, figures, places = offers
    left, used, most_used, room, capacity = supply
    lo, state, joined, width = here
    _, states, spread, widths = counts.shape
    layers = below.shape[0] - 1
    front, origin = points[here], parents[here]
    for k in range(counts[here]):
        reached = front[k]
        if origin[k, 0] == IDLE:
            continue
        if reached[1] * capacity[state] + rest_s > limit_s * capacity[state]:
            continue
        index = (((lo * states + state) * spread + joined) * widths + width) * front.shape[0] + k
        for option in range(offsets.shape[0]):
            if not are_left(taken, option, left, state):
                continue
            target, replicas = state + offsets[option], int(figures[option, 8])
            senders = widest_of(width, most_used[state])
            overlap = overlap_rows(question[1], senders, replicas)
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
                link = (crossing, question[2 + 2 * crossing], question[3 + 2 * crossing])
                if add_stages(
                    fronts,
                    below,
                    reached,
                    (index, lo),
                    option,
                    (target, now),
                    link,
                    overlap,
                    table,
                    figures,
                    chain,
                    hub,
                    question,
                    limit_s,
                    point,
                ):
                    parents[layers, target, now, 0, 0, 0] = index
                    parents[layers, target, now, 0, 0, 1] = option
                    return ((layers * states + target) * spread + now) * widths * front.shape[0]
    return -1


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
    makes the tensor with many readers: the next two figures of a point are until when its stage
    sends, and how much longer for each further stage that reads it; the last is `pace_of`.
    """
    batches, rows, layers = question[0], question[1], times.shape[1] - 1
    chain, offers = (times, near, reader, pairs), (offsets, taken, figures, places)
    supply, hub = (left, used, most_used, room, capacity), (hub_reader, hub_size)
    trips_below(below, table, offers, left, most_used, chain, question, limit_s)
    fronts, point = (counts, points, parents), np.zeros(7)
    counts[:] = 0
    counts[0, 0, 0, 0] = 1
    points[0, 0, 0, 0, 0, :] = 0.0
    parents[0, 0, 0, 0, 0] = -1
    for lo in range(layers):
        rest_row = times[1, layers] + times[3, layers] - times[1, lo] - times[3, lo]
        rest_fixed = times[0, layers] + times[2, layers] - times[0, lo] - times[2, lo]
        rest_s = batches * (rest_row * rows + rest_fixed * question[7])
        for state in range(left.shape[0] if lo > 0 else 1):
            for joined in range(room.shape[0]):
                for width in range(WIDTHS):
                    here = (lo, state, joined, width)
                    if counts[here] == 0:
                        continue
                    if lo > 0:
                        leave_idle(fronts, here, left, steps, point)
                    found = go_on(
                        fronts,
                        here,
                        below,
                        table,
                        offers,
                        supply,
                        chain,
                        hub,
                        question,
                        limit_s,
                        rest_s,
                        point,
                    )
                    if found >= 0:
                        return found
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
        until_drained_s,
        are_left,
        arrival,
        pace_of,
        leave_idle,
        add_stages,
        go_on,
    ):
        register_jitable(helper)
    return cast("Callable[..., int]", numba.njit(cache=True, nogil=True)(reach))
