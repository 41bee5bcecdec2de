"""Piper's planner on a chain: the least slowest stage under in-flight memory."""

from collections.abc import Iterator
from math import ceil, inf

import numpy as np

from penstock.cluster.link_matrices import link_matrices
from penstock.core.native import WindowLoad
from penstock.costs.fit import with_needed_recompute
from penstock.costs.run_tables import Floats
from penstock.costs.stage_costs import depth_function, estimate_s
from penstock.costs.tables import ChainCosts
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.choice import Candidate, best_candidate, few_first
from penstock.planners.coarse_chain import (
    DeviceLine,
    device_line,
    few_sizes_for_tables,
    likely_cuts,
    windows_of_line,
)
from penstock.planners.slowest_stage import SlowestStage, slowest_stage

TRIES = 2

MOST_CUTS = 96
"""Longer chains are cut at this number of likely places only."""


def piper(problem: PlanningProblem, score: Score) -> Plan:
    """Piper's plan (Tarnawski, Narayanan, Phanishayee; NeurIPS 2021), restricted to a chain.

    Piper cuts a graph of layers into downsets. Here the layers are a chain, so each downset is a
    beginning of the chain. Our plans have no tensor parallelism. So the sum of the data-parallel
    degrees of a stage and all later ones is the number of devices that they use, and one index
    serves for both. The recurrence is at `piper_table`. It minimises the time between micro-batches
    and ignores fill and drain. ``score`` judges its plans for every number of devices and a few
    micro-batch sizes.

    Piper keeps ``ceil(s / d)`` micro-batches in flight on a stage of ``d`` replicas with ``s``
    devices from it to the end. Our schedules keep as many as there are stages. Where these are more
    and do not fit, all such plans score infinite. Then the recurrence is computed again with the
    most micro-batches that the schedule could keep.
    """
    found: list[Candidate] = []
    every_cut = tuple(range(len(problem.profile.layers) + 1))
    few = (likely_cuts(problem, MOST_CUTS), few_sizes_for_tables(problem), 0)
    whole = (every_cut, tuple(sorted(problem.micro_batch_sizes)))
    for cuts, sizes, spare in dict.fromkeys((few, (*few[:2], 1), (*whole, 0), (*whole, 1))):
        chain = ChainCosts(problem, cuts)
        found = [c for size in sizes for c in plans_of_counts(chain, size, deep=bool(spare))]
        if any(score(c.plan) < inf for late, c in few_first(found, TRIES) if not late):
            break
    return best_candidate(problem, found, score, planner="piper", tries=TRIES)


def plans_of_counts(chain: ChainCosts, size: int, *, deep: bool) -> Iterator[Candidate]:
    """The best plan for every number of devices (an end of the cluster's own order)."""
    problem = chain.problem
    schedule = "1f1b" if "1f1b" in problem.schedules else problem.schedules[0]
    line = device_line(tuple(range(len(problem.cluster.devices))), size)
    table = piper_table(chain, line, size, schedule, deep=deep)
    for position in range(line.blocks):
        if table.seconds(position) < inf:
            plan = with_needed_recompute(problem, table.plan(position, schedule))
            yield Candidate(plan, estimate_s(problem, plan))


def piper_table(
    chain: ChainCosts, line: DeviceLine, size: int, schedule: str, *, deep: bool = False
) -> SlowestStage:
    """The least slowest stage of every end of the chain on every end of the line.

        T(lo, s) = min over hi, d of  max{ load(lo, hi, d, s),  T(hi, s - d) }
        load     = compute / d  +  4 (d - 1)/d * parameters / bandwidth / M
                   + 2 * (bytes in + bytes out) / d / bandwidth

    ``T(lo, s)`` is on the last ``s`` devices of the line, with the stage on the first ``d`` of
    them. It is infinite where parameters, optimizer and ``ceil(s / d)`` micro-batches do not fit. A
    stage recomputes if it must, which adds the forward to the load. The factor 4 is that of
    PipeDream's parameter server. Bandwidths are those of our links: inside a stage the slowest
    between neighbours of the line, outside those from its first and last device to their
    neighbours. ``deep`` counts as many micro-batches as ``schedule`` keeps if every later device is
    a stage of its own.
    """
    windows, micro_batches = windows_of_line(chain, line, size), chain.problem.global_batch // size
    links, loads = link_matrices(chain.problem.cluster).bytes_per_s, list[WindowLoad]()
    for place, group in enumerate(windows.groups.ravel().tolist()):
        if group < 0:
            loads.append(WindowLoad(-1, 1, 1, 0.0, 0.0, 0.0))
            continue
        position, number = divmod(place, len(line.widths))
        width = line.widths[number]
        depth = in_flight(line, position, width, micro_batches, schedule, deep=deep)
        before, after, parameter = seconds_per_byte(links, line, position, width)
        each_s = before, after, parameter / micro_batches
        loads.append(WindowLoad(group, depth, width * line.block, *each_s))
    return slowest_stage(windows, loads, chain.problem.recompute)


def seconds_per_byte(
    links: Floats, line: DeviceLine, position: int, width: int
) -> tuple[float, float, float]:
    """Seconds per byte on the links before and behind a window, and of its parameters once."""
    first, last = position * line.block, (position + width) * line.block - 1
    order = line.order
    before = 1 / float(links[order[first - 1], order[first]]) if first > 0 else 0.0
    after = 1 / float(links[order[last], order[last + 1]]) if last + 1 < len(order) else 0.0
    replicas = width * line.block
    inside = np.array(order[first : last + 1])
    slowest = float(links[inside[:-1], inside[1:]].min(initial=inf))
    return before, after, 4 * (replicas - 1) / replicas * (1 / slowest)


def in_flight(
    line: DeviceLine, position: int, width: int, micro_batches: int, schedule: str, *, deep: bool
) -> int:
    """Micro-batches in flight assumed for the stage on a window."""
    to_the_end = line.blocks - position
    if deep:
        return depth_function(schedule)(to_the_end - width + 1, micro_batches)
    return min(ceil(to_the_end / width), micro_batches)
