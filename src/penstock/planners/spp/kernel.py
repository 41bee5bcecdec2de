"""The compiled loops of `penstock.planners.spp.partition`; tests hold them to brute force."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from typing import NamedTuple

import numpy as np

from penstock.flat_record import borrowed
from penstock.kernels import compiled
from penstock.plan.compiled_cost import (
    FULL,
    LOAD_TERMS,
    MOST_LOADS,
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
    """The best plan of each state: stages, first cut, first block and number of the first width.

    ``seconds``: the least objective, infinite where there is no plan; then the others say nothing.
    ``passed_s``: until one micro-batch has passed all stages and channels. ``slowest_s``: the
    slowest stage or channel. Of the first stage: ``end`` is the cut where it ends, ``next_number``
    the number of the width of the window behind it, ``recompute`` whether it recomputes.
    """

    seconds: Floats
    passed_s: Floats
    slowest_s: Floats
    end: Integers
    next_number: Integers
    recompute: Integers


class TableWorkspace(NamedTuple):
    """Flat arrays for values between the states of a table.

    ``least``: the least objective over the widths, by stages, first block and first cut; ``floor``:
    also over all cuts up to the first cut, so it never grows with the cut. ``round_trip_s`` and
    ``busier_s``: seconds from a window to each window behind it, by width and cut: of both
    directions together, and of the busier one. ``busy`` and ``loads`` are for `transfer_loads`.
    """

    least: Floats
    floor: Floats
    round_trip_s: Floats
    busier_s: Floats
    busy: Floats
    loads: Floats


def table_for(inputs: TableInputs, cuts: int) -> Table:
    """An empty table."""
    shape = (inputs.stages, cuts, inputs.blocks, inputs.widths)
    seconds = np.full(shape, np.inf)
    passed_s, slowest_s = np.empty((2, *shape))
    end, next_number, recompute = np.zeros((3, *shape), dtype=np.int64)
    return Table(seconds, passed_s, slowest_s, end, next_number, recompute)


def filled(table: Table, costs: Costs, network: Network, inputs: TableInputs) -> Table:
    """The table, filled with the best plan of every state."""
    least, floor = np.full((2, inputs.stages * (inputs.blocks + 1) * costs.cuts), np.inf)
    round_trip_s, busier_s = np.zeros((2, inputs.widths * costs.cuts))
    busy, loads = np.zeros(LOAD_TERMS * resources(network)), np.zeros(2 * LOAD_TERMS * MOST_LOADS)
    workspace = TableWorkspace(least, floor, round_trip_s, busier_s, busy, loads)
    compiled(fill)(table, costs, network, inputs, workspace)
    return table


def fill(
    table: Table, costs: Costs, network: Network, inputs: TableInputs, workspace: TableWorkspace
) -> None:
    """Fill a table from the last window of the line to the first."""
    fill_windows(
        borrowed(table),
        borrowed(costs),
        borrowed(network),
        borrowed(inputs),
        borrowed(workspace),
    )


def fill_windows(table, costs, network, inputs, workspace):
    """`fill`, on addresses."""
    cuts, widths = costs.cuts, inputs.widths
    for position in range(inputs.blocks - 1, -1, -1):
        for number in range(widths):
            if inputs.groups[position * widths + number] >= 0:
                put_moves(costs, network, inputs, position, number, workspace)
                for k in range(1, inputs.stages):
                    for lo in range(cuts - 1):
                        extend(table, costs, inputs, position, number, k, lo, workspace)
        for k in range(1, inputs.stages):
            lowest = np.inf
            here = (k * (inputs.blocks + 1) + position) * cuts
            for lo in range(cuts):
                state = state_of(costs, inputs, k, lo, position)
                for number in range(widths):
                    seconds = table.seconds[state + number]
                    workspace.least[here + lo] = min(workspace.least[here + lo], seconds)
                lowest = min(lowest, workspace.least[here + lo])
                workspace.floor[here + lo] = lowest


def state_of(costs, inputs, k, lo, position):
    """The place in a table of the first state of ``k`` stages from a cut and a block on."""
    return ((k * costs.cuts + lo) * inputs.blocks + position) * inputs.widths


def put_moves(costs, network, inputs, position, number, workspace):
    """Fill in ``round_trip_s`` and ``busier_s`` for the windows behind a window."""
    down, up = 0, LOAD_TERMS * MOST_LOADS
    own, behind = inputs.groups[position * inputs.widths + number], position + inputs.width[number]
    if behind == inputs.blocks:
        return
    for w in range(inputs.widths):
        other = inputs.groups[behind * inputs.widths + w]
        if other >= 0:
            downs = transfer_loads(network, own, other, workspace.busy, workspace.loads, down)
            ups = transfer_loads(network, other, own, workspace.busy, workspace.loads, up)
            for cut in range(costs.cuts):
                down_s = load_s(
                    workspace.loads, down, downs, costs.down_fixed[cut], costs.down_each[cut]
                )
                up_s = load_s(workspace.loads, up, ups, costs.up_fixed[cut], costs.up_each[cut])
                workspace.round_trip_s[w * costs.cuts + cut] = down_s + up_s
                workspace.busier_s[w * costs.cuts + cut] = max(down_s, up_s)


def extend(table, costs, inputs, position, number, k, lo, workspace):
    """Find the best first stage of ``k`` on a window, for the layers from cut ``lo`` on.

    A stage's own seconds never shrink as its end moves up, and the floor of the rest never grows.
    The search starts at the end where they meet. It goes up until the stage alone takes too long,
    then down until the rest alone does. Most states have no plan of so many stages at all.
    """
    least, floor = workspace.least, workspace.floor
    group, layers = inputs.groups[position * inputs.widths + number], costs.cuts - 1
    state, micro_batches = state_of(costs, inputs, k, lo, position) + number, inputs.micro_batches
    if k == 1:
        busy_s, again = stage_s(costs, group, lo, layers, inputs.depths[1], inputs.recompute)
        own_s = micro_batches * busy_s + all_reduce_and_step_s(costs, group, lo, layers)
        table.seconds[state], table.end[state], table.recompute[state] = own_s, layers, again
        table.passed_s[state] = table.slowest_s[state] = busy_s
        return
    behind = position + inputs.width[number]
    after = ((k - 1) * (inputs.blocks + 1) + behind) * costs.cuts
    first_end, last_end = lo + 1, layers - k + 1
    if last_end < first_end or floor[after + last_end] == np.inf:
        return
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
                busy_s, again = stage_s(costs, group, lo, hi, inputs.depths[k], inputs.recompute)
                if busy_s < np.inf:
                    found = (hi, again, busy_s, tail_s + micro_batches * busy_s)
                    states = (state, state_of(costs, inputs, k - 1, hi, behind))
                    try_end(table, costs, inputs, workspace, states, found)
            hi += direction


def try_end(table, costs, inputs, workspace, states, found):
    """Keep a stage that ends at a cut, with the best window behind it, if that is better."""
    state, after = states
    hi, again, busy_s, own_s = found
    for w in range(inputs.widths):
        moved_s = workspace.round_trip_s[w * costs.cuts + hi]
        if inputs.drains:
            busier = inputs.micro_batches * workspace.busier_s[w * costs.cuts + hi]
            seconds = max(own_s, busier, busy_s + moved_s + table.seconds[after + w])
        else:
            seconds = max(own_s, inputs.micro_batches * moved_s, table.seconds[after + w])
        if seconds < table.seconds[state]:
            table.seconds[state] = seconds
            table.end[state], table.next_number[state], table.recompute[state] = hi, w, again
            table.passed_s[state] = busy_s + moved_s + table.passed_s[after + w]
            table.slowest_s[state] = max(busy_s, moved_s, table.slowest_s[after + w])


def stage_s(costs, group, lo, hi, depth, mode):
    """Seconds of a micro-batch, infinite where the stage is `FULL`; and whether it recomputes."""
    does = recomputes(costs, group, lo, hi, depth, mode)
    if does == FULL:
        return np.inf, does
    seconds = micro_batch_s(costs, group, lo, hi)
    if does == RECOMPUTES and depth > 1:
        seconds += forward_s(costs, group, lo, hi)
    return seconds, does
