"""Which relaxed plans stay within a time: a dynamic program over layers and devices left."""

import numpy as np
from numpy.typing import NDArray

from penstock.bounds.stage import (
    Fronts,
    add_stages,
)
from penstock.bounds.steps import (
    FINE_FRONT,
    FRONT,
    FRONT_OF_MANY,
    IDLE,
    POINT,
    SPREADS,
    WIDTHS,
    Chain,
    Offers,
    Table,
    are_left,
    hosts_after,
    insert,
    widest_of,
)
from penstock.bounds.trips import trips_below
from penstock.kernels import copy_into
from penstock.plan.run_tables import Floats

__all__ = [
    "FINE_FRONT",
    "FRONT",
    "FRONT_OF_MANY",
    "SPREADS",
    "WIDTHS",
    "reach",
]

Integers = NDArray[np.int64]

Supply = tuple[Integers, Integers, Integers, Integers, Floats]
"""What is left in every state, the fewest and the most devices in use, the room on hosts, and for
every state the most speed left."""


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
            copy_into(point, points[lo, state, joined, width, k])
            counts[lo, idle, joined, width] = insert(
                points[lo, idle, joined, width],
                parents[lo, idle, joined, width],
                counts[lo, idle, joined, width],
                point,
                IDLE,
                0,
            )


def go_on(
    fronts: Fronts,
    here: tuple[int, int, int, int],
    below: Floats,
    table: Table,
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
    layers = below.shape[1] - 1
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
            target = state + offsets[option]
            senders = widest_of(width, most_used[state])
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
                    senders,
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
    runs: Integers,
    entries: Floats,
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
    passing: Integers,
    pairs: Floats,
    traffic: Floats,
    hub_reader: Integers,
    hub_size: Floats,
    capacity: Floats,
    question: Floats,
    limit_s: float,
) -> int:
    """The index of a point of a relaxed plan that takes no longer than ``limit_s``, or -1.

    ``points[lo, state, joined, width]``: the least figures with which layers before ``lo`` can
    run on the devices taken in ``state``, which are on ``joined + 1`` hosts, the last stage
    ``width`` wide (`penstock.bounds.steps.POINT`). ``left[state]``: digits of the supply left,
    ``used[state]`` the fewest devices taken and ``most_used[state]`` the most, ``steps`` the
    strides of the digits; ``room[joined]``: the most devices of so many hosts;
    ``places[option]``: 0 inside one host, 1 across hosts, 2 does not matter; ``pairs``: seconds per
    byte there and back. ``question``: micro-batches, rows, latency, seconds per byte, latency and
    seconds per byte between hosts, most stages, least over most speed, the layer that makes the
    tensor with many readers, and whether single rows are left out of `trips_below`.
    """
    batches, rows, layers = question[0], question[1], times.shape[1] - 1
    chain = (times, near, reader, passing, pairs, traffic)
    table, offers = (runs, entries), (offsets, taken, figures, places)
    supply, hub = (left, used, most_used, room, capacity), (hub_reader, hub_size)
    trips_below(below, table, offers, left, most_used, chain, question, limit_s)
    fronts, point = (counts, points, parents), np.zeros(POINT)
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
                        fronts, here, below, table, offers, supply, chain, hub, question, limit_s,
                        rest_s, point,
                    )  # fmt: skip
                    if found >= 0:
                        return found
    return -1
