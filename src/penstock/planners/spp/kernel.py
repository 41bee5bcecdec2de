"""The compiled loops of `penstock.planners.spp.partition`; tests hold them to brute force."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from typing import NamedTuple

import numpy as np

from penstock.borrowed import borrowed
from penstock.kernels import compiled
from penstock.plan.compiled_cost import (
    FIGURES,
    FULL,
    LOADS,
    RECOMPUTES,
    all_reduce_and_step_s,
    forward_s,
    load_s,
    micro_batch_s,
    recomputes,
    resources,
    transfer_loads,
)
from penstock.plan.cost_tables import Costs, Network
from penstock.plan.run_tables import Floats, Integers

__all__ = ["Table", "TableInputs", "filled", "table_for"]


class TableInputs(NamedTuple):
    """What a table is filled for.

    A window of the line is ``position * widths + number``, its group of devices in ``groups``, -1
    where the line ends before it does; ``depths[k]`` are the micro-batches in flight of a stage
    with ``k`` stages from itself to the end.
    """

    stages: int
    blocks: int
    widths: int
    groups: Integers
    width: Integers
    depths: Integers
    micro_batches: int
    recompute: int
    drains: bool


class Table(NamedTuple):
    """By stages, first cut, first block and number of the first width.

    The least objective; seconds until one micro-batch has passed all stages and channels, and the
    slowest of these; where the first stage ends, the number of the width of the window behind it,
    and whether it recomputes.
    """

    seconds: Floats
    passed_s: Floats
    slowest_s: Floats
    end: Integers
    next_number: Integers
    recompute: Integers


class TableWorkspace(NamedTuple):
    """What a table is filled with the help of; flat.

    The least objective over the widths by stages, first block and first cut; the least over all
    starts up to a cut too, which never grows with it. Seconds from a window to each window behind
    it by width and cut: both ways, and the busier. What `transfer_loads` works on.
    """

    least: Floats
    floor: Floats
    round_trip_s: Floats
    busier_s: Floats
    busy: Floats
    loads: Floats


def table_for(asked: TableInputs, cuts: int) -> Table:
    """An empty table."""
    shape = (asked.stages, cuts, asked.blocks, asked.widths)
    seconds, passed_s, slowest_s = np.full((3, *shape), np.inf)
    end, next_number, recompute = np.zeros((3, *shape), dtype=np.int64)
    return Table(seconds, passed_s, slowest_s, end, next_number, recompute)


def filled(table: Table, costs: Costs, network: Network, asked: TableInputs) -> Table:
    """The table with the best stages of every state."""
    least, floor = np.full((2, asked.stages * (asked.blocks + 1) * costs.cuts), np.inf)
    round_trip_s, busier_s = np.zeros((2, asked.widths * costs.cuts))
    busy, loads = np.zeros(FIGURES * resources(network)), np.zeros(2 * FIGURES * LOADS)
    room = TableWorkspace(least, floor, round_trip_s, busier_s, busy, loads)
    compiled(fill)(table, costs, network, asked, room)
    return table


def fill(
    table: Table, costs: Costs, network: Network, asked: TableInputs, room: TableWorkspace
) -> None:
    """Fill a table from the last window of the line to the first."""
    fill_windows(
        borrowed(table),
        borrowed(costs),
        borrowed(network),
        borrowed(asked),
        borrowed(room),
    )


def fill_windows(table, costs, network, asked, room):
    """`fill`, on addresses."""
    cuts, widths = costs.cuts, asked.widths
    for position in range(asked.blocks - 1, -1, -1):
        for number in range(widths):
            if asked.groups[position * widths + number] >= 0:
                put_moves(costs, network, asked, position, number, room)
                for k in range(1, asked.stages):
                    for lo in range(cuts - 1):
                        extend(table, costs, asked, position, number, k, lo, room)
        for k in range(1, asked.stages):
            lowest = np.inf
            here = (k * (asked.blocks + 1) + position) * cuts
            for lo in range(cuts):
                state = state_of(costs, asked, k, lo, position)
                for number in range(widths):
                    seconds = table.seconds[state + number]
                    room.least[here + lo] = min(room.least[here + lo], seconds)
                lowest = min(lowest, room.least[here + lo])
                room.floor[here + lo] = lowest


def state_of(costs, asked, k, lo, position):
    """Where the states of ``k`` stages from a cut and a block on stand in a table, by width."""
    return ((k * costs.cuts + lo) * asked.blocks + position) * asked.widths


def put_moves(costs, network, asked, position, number, room):
    """Seconds from a window to each window behind it for each cut: both ways, and the busier."""
    down, up = 0, FIGURES * LOADS
    own, behind = asked.groups[position * asked.widths + number], position + asked.width[number]
    if behind == asked.blocks:
        return
    for w in range(asked.widths):
        other = asked.groups[behind * asked.widths + w]
        if other >= 0:
            downs = transfer_loads(network, own, other, room.busy, room.loads, down)
            ups = transfer_loads(network, other, own, room.busy, room.loads, up)
            for cut in range(costs.cuts):
                down_s = load_s(
                    room.loads, down, downs, costs.down_fixed[cut], costs.down_each[cut]
                )
                up_s = load_s(room.loads, up, ups, costs.up_fixed[cut], costs.up_each[cut])
                room.round_trip_s[w * costs.cuts + cut] = down_s + up_s
                room.busier_s[w * costs.cuts + cut] = max(down_s, up_s)


def extend(table, costs, asked, position, number, k, lo, room):
    """Find the best first stage of ``k`` on a window, for the layers from cut ``lo`` on.

    A stage's own seconds never shrink with its end: from the end where they meet the floor of the
    rest the search goes up until the stage alone is too much, then down until the rest alone is.
    """
    least, floor = room.least, room.floor
    group, layers = asked.groups[position * asked.widths + number], costs.cuts - 1
    state, micro_batches = state_of(costs, asked, k, lo, position) + number, asked.micro_batches
    if k == 1:
        busy_s, again = stage_s(costs, group, lo, layers, asked.depths[1], asked.recompute)
        own_s = micro_batches * busy_s + all_reduce_and_step_s(costs, group, lo, layers)
        table.seconds[state], table.end[state], table.recompute[state] = own_s, layers, again
        table.passed_s[state] = table.slowest_s[state] = busy_s
        return
    behind = position + asked.width[number]
    after = ((k - 1) * (asked.blocks + 1) + behind) * costs.cuts
    first_end, last_end = lo + 1, layers - k + 1
    meeting, high = first_end, last_end + 1
    while meeting < high:
        middle = (meeting + high) // 2
        own_s = micro_batches * micro_batch_s(costs, group, lo, middle)
        if own_s + all_reduce_and_step_s(costs, group, lo, middle) >= floor[after + middle]:
            high = middle
        else:
            meeting = middle + 1
    for direction in (1, -1):
        hi = meeting if direction == 1 else meeting - 1
        while first_end <= hi <= last_end:
            if direction == -1 and floor[after + hi] >= table.seconds[state]:
                break
            tail_s = all_reduce_and_step_s(costs, group, lo, hi)
            own_s = tail_s + micro_batches * micro_batch_s(costs, group, lo, hi)
            if own_s >= table.seconds[state]:
                if direction == 1:
                    break
            elif least[after + hi] < table.seconds[state]:
                busy_s, again = stage_s(costs, group, lo, hi, asked.depths[k], asked.recompute)
                if busy_s < np.inf:
                    found = (hi, again, busy_s, tail_s + micro_batches * busy_s)
                    states = (state, state_of(costs, asked, k - 1, hi, behind))
                    try_end(table, costs, asked, room, states, found)
            hi += direction


def try_end(table, costs, asked, room, states, found):
    """Keep a stage that ends at a cut with the best window behind it, where it is better."""
    state, after = states
    hi, again, busy_s, own_s = found
    for w in range(asked.widths):
        moved_s = room.round_trip_s[w * costs.cuts + hi]
        if asked.drains:
            busier = asked.micro_batches * room.busier_s[w * costs.cuts + hi]
            seconds = max(own_s, busier, busy_s + moved_s + table.seconds[after + w])
        else:
            seconds = max(own_s, asked.micro_batches * moved_s, table.seconds[after + w])
        if seconds < table.seconds[state]:
            table.seconds[state] = seconds
            table.end[state], table.next_number[state], table.recompute[state] = hi, w, again
            table.passed_s[state] = busy_s + moved_s + table.passed_s[after + w]
            table.slowest_s[state] = max(busy_s, moved_s, table.slowest_s[after + w])


def stage_s(costs, group, lo, hi, depth, mode):
    """Seconds of a micro-batch, infinite where the stage is `FULL`; and what it does."""
    does = recomputes(costs, group, lo, hi, depth, mode)
    if does == FULL:
        return np.inf, does
    seconds = micro_batch_s(costs, group, lo, hi)
    if does == RECOMPUTES and depth > 1:
        seconds += forward_s(costs, group, lo, hi)
    return seconds, does
