"""Cuts a chain over neighbouring devices so that the slowest stage is as fast as possible."""

# Helpers of compiled functions have no types of their own: numba finds them.
# pyright: basic

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.flat_record import borrowed
from penstock.kernels import compiled
from penstock.plan.compiled_cost import (
    FULL,
    RECOMPUTE_MODES,
    RECOMPUTES,
    forward_s,
    micro_batch_s,
    recomputes,
)
from penstock.plan.cost_tables import ChainCosts, Costs
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import RecomputeChoice
from penstock.plan.run_tables import Floats, Integers, at
from penstock.planners.coarse_chain import LineWindows

__all__ = ["Loads", "SlowestStage", "slowest_stage"]


class Loads(NamedTuple):
    """The load of a stage on each window of a line beside computing, by position, then width.

    ``depth``: its micro-batches in flight. ``replicas`` share the messages. The others are seconds
    for each byte that crosses its first and its last cut, and for each byte of its parameters.
    """

    depth: Integers
    replicas: Integers
    before_s_per_byte: Floats
    after_s_per_byte: Floats
    parameter_s_per_byte: Floats


class SlowestStageInputs(NamedTuple):
    """The windows of a line (group -1: none), the bytes at each cut, and the recompute mode.

    Of equally good ends, the most ``balanced`` one is taken, or else the first.
    """

    blocks: int
    widths: int
    groups: Integers
    width: Integers
    crossing_bytes: Floats
    recompute: int
    balanced: bool


class SlowestStageTable(NamedTuple):
    """For each first block and first cut: the least slowest stage; the first stage's end and width.

    ``floor`` is the least ``seconds`` over all cuts up to one, so it never grows with the cut.
    """

    seconds: Floats
    floor: Floats
    end: Integers
    number: Integers


@dataclass(frozen=True)
class SlowestStage:
    """The result of `slowest_stage`."""

    chain: ChainCosts
    windows: LineWindows
    micro_batch_size: int
    table: SlowestStageTable

    def seconds(self, position: int) -> float:
        """The slowest stage of all layers on the blocks from ``position`` on."""
        return float(self.table.seconds[position, 0])

    def plan(self, position: int, schedule: str) -> Plan:
        """The plan behind it, without recompute."""
        windows, chain = self.windows, self.chain
        found: list[Stage] = []
        lo = 0
        while lo < chain.layers:
            number, hi = self.table.number[position, lo], int(self.table.end[position, lo])
            group = windows.groups[position, number]
            layers = chain.layers_of(lo, hi)
            found.append(Stage(layers, windows.devices[group], windows.slices[group]))
            lo, position = hi, position + windows.line.widths[number]
        micro_batches = chain.problem.global_batch // self.micro_batch_size
        return Plan(tuple(found), micro_batches, self.micro_batch_size, schedule)


def slowest_stage(
    chain: ChainCosts,
    windows: LineWindows,
    loads: Loads,
    micro_batch_size: int,
    recompute: RecomputeChoice,
    *,
    balanced: bool = False,
) -> SlowestStage:
    """The least slowest stage of every end of the chain on every end of a line of devices.

        T(lo, p) = min over ends hi and widths w of  max{ load(lo, hi, p, w),  T(hi, p + w) }

    The result is exact; tests compare it with enumeration. Of equally good plans, ``balanced``
    takes one whose stages are near the slowest, instead of the one with the shortest first stage.
    """
    line = windows.line
    shape = (line.blocks + 1, len(chain.cuts))
    seconds, floor = np.full((2, *shape), inf)
    seconds[-1, -1] = floor[-1, -1] = 0.0
    end, number = np.zeros((2, *shape), dtype=np.int64)
    table = SlowestStageTable(seconds, floor, end, number)
    inputs = SlowestStageInputs(
        blocks=line.blocks,
        widths=len(line.widths),
        groups=windows.groups,
        width=np.array(line.widths, dtype=np.int64),
        crossing_bytes=at(chain.runs.down, micro_batch_size),
        recompute=RECOMPUTE_MODES[recompute],
        balanced=balanced,
    )
    compiled(fill)(table, loads, windows.costs, inputs)
    return SlowestStage(chain, windows, micro_batch_size, table)


def fill(table: SlowestStageTable, loads: Loads, costs: Costs, inputs: SlowestStageInputs) -> None:
    """Fill a table from the last block of the line to the first."""
    fill_windows(
        borrowed(table),
        borrowed(loads),
        borrowed(costs),
        borrowed(inputs),
    )


def fill_windows(table, loads, costs, inputs):
    """`fill`, on addresses."""
    cuts = costs.cuts
    for position in range(inputs.blocks - 1, -1, -1):
        for number in range(inputs.widths):
            if inputs.groups[position * inputs.widths + number] >= 0:
                for lo in range(cuts - 1):
                    extend(table, loads, costs, inputs, position, number, lo)
        lowest = np.inf
        for state in range(position * cuts, (position + 1) * cuts):
            lowest = min(lowest, table.seconds[state])
            table.floor[state] = lowest


def extend(table, loads, costs, inputs, position, number, lo):
    """Let a window hold the first stage of the layers from a cut on, where that is better.

    The stage's computing never shrinks as its end moves up, and the floor of the rest never grows.
    The search starts at the first end where the rest may be better, and goes up until computing
    takes too long. If ``balanced``, it starts where both meet, and also goes down until the rest
    takes too long.
    """
    window, state = position * inputs.widths + number, position * costs.cuts + lo
    group, behind = inputs.groups[window], (position + inputs.width[number]) * costs.cuts
    first, high = lo + 1, costs.cuts
    while first < high:
        middle = (first + high) // 2
        least_s = table.seconds[state]
        if inputs.balanced:
            least_s = micro_batch_s(costs, group, lo, middle)
        rest_s = table.floor[behind + middle]
        if rest_s < least_s or (inputs.balanced and rest_s == least_s):
            high = middle
        else:
            first = middle + 1
    for hi in range(first, costs.cuts):
        if micro_batch_s(costs, group, lo, hi) >= table.seconds[state]:
            break
        try_end(table, loads, costs, inputs, (window, state, behind), lo, hi, number)
    if inputs.balanced:
        for hi in range(first - 1, lo, -1):
            if table.floor[behind + hi] >= table.seconds[state]:
                break
            try_end(table, loads, costs, inputs, (window, state, behind), lo, hi, number)


def try_end(table, loads, costs, inputs, places, lo, hi, number):
    """Keep a stage that ends at a cut if it is better; of equal ones, the one tried first."""
    window, state, behind = places
    rest_s, depth = table.seconds[behind + hi], loads.depth[window]
    moved_s = loads.before_s_per_byte[window] * inputs.crossing_bytes[lo]
    moved_s += loads.after_s_per_byte[window] * inputs.crossing_bytes[hi]
    beside_s = 2 * moved_s / loads.replicas[window]
    beside_s += loads.parameter_s_per_byte[window] * costs.parameters[lo * costs.cuts + hi]
    group = inputs.groups[window]
    computing_s = micro_batch_s(costs, group, lo, hi)
    if max(computing_s + beside_s, rest_s) >= table.seconds[state]:
        return
    does = recomputes(costs, group, lo, hi, depth, inputs.recompute)
    if does == RECOMPUTES and depth > 1:
        computing_s += forward_s(costs, group, lo, hi)
    seconds = max(beside_s + computing_s, rest_s)
    if does != FULL and seconds < table.seconds[state]:
        table.seconds[state], table.end[state], table.number[state] = seconds, hi, number
