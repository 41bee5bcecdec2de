"""Piper's planner on a chain: the least slowest stage under in-flight memory."""

from collections.abc import Iterator
from math import ceil, inf

import numpy as np

from penstock.kernels import compiled
from penstock.plan.candidate import Candidate
from penstock.plan.cost import depth_function, estimate_s, rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, Score
from penstock.plan.run_tables import Floats
from penstock.planners.piper_kernels import extend_prefixes
from penstock.planners.spp.arrays import (
    DeviceLine,
    Integers,
    ProfileArrays,
    device_line,
    few_cuts,
    few_sizes_for_tables,
)
from penstock.planners.spp.choice import best_of_few, few_first, with_needed_recompute
from penstock.planners.spp.graph import LinkArrays, link_arrays

__all__ = ["piper", "slowest_stage"]

TRIES = 2
NUMBERS = 1024
"""An end and the number of a width are kept as one figure, the end times this plus the number."""


def piper(problem: PlanningProblem, score: Score) -> Plan:
    """Piper's plan (Tarnawski, Narayanan, Phanishayee; NeurIPS 2021), restricted to a chain.

    Piper cuts a graph of layers into downsets; layers here already stand in a line, so the
    downsets are those whose rest is an end of the line. Tensor parallelism is not among our
    plans; without it the sum of the data-parallel degrees of a stage and all later ones is the
    number of devices that they use, so one index serves for both. See `slowest_stage` for the
    recurrence, which minimises the time between micro-batches and knows nothing of fill and drain;
    ``score`` judges its plans for every number of devices and a few micro-batch sizes.

    Piper keeps ``ceil(s / d)`` micro-batches in flight on a stage of ``d`` replicas with ``s``
    devices from it to the end. Our schedules keep as many as there are stages; where that is more
    and does not fit, such a plan scores infinite; then the recurrence is run again with the most
    that the schedule could keep.

    Raises:
        Infeasible: no plan fits; the message says what would.
    """
    found: list[Candidate] = []
    every_cut = tuple(range(len(problem.profile.layers) + 1))
    few = (few_cuts(problem.profile), few_sizes_for_tables(problem), 0)
    whole = (every_cut, tuple(sorted(problem.micro_batch_sizes)))
    for cuts, sizes, spare in dict.fromkeys((few, (*few[:2], 1), (*whole, 0), (*whole, 1))):
        arrays = ProfileArrays(problem, cuts)
        found = [c for size in sizes for c in candidates(arrays, size, deep=bool(spare))]
        if any(score(c.plan) < inf for late, c in few_first(found, TRIES) if not late):
            break
    return best_of_few(problem, found, score, planner="piper", tries=TRIES)


def candidates(arrays: ProfileArrays, size: int, *, deep: bool) -> Iterator[Candidate]:
    """For every number of devices (an end of the cluster's own order) the best plan."""
    problem = arrays.problem
    schedule = "1f1b" if "1f1b" in problem.schedules else problem.schedules[0]
    line = device_line(tuple(range(len(problem.cluster.devices))), size)
    value, choice = slowest_stage(arrays, line, size, schedule, deep=deep)
    for position in range(line.blocks):
        if value[0, position] < inf:
            plan = plan_of(arrays, line, size, schedule, choice, position)
            yield Candidate(plan, estimate_s(problem, plan))


def slowest_stage(
    arrays: ProfileArrays, line: DeviceLine, size: int, schedule: str, *, deep: bool = False
) -> tuple[Floats, Integers]:
    """The least slowest stage of every end of the chain on every end of the line, and the choice.

        T(lo, s) = min over hi, d of  max{ load(lo, hi, d, s),  T(hi, s - d) }
        load     = compute / d  +  4 (d - 1)/d * parameters / bandwidth / M
                   + 2 * (bytes in + bytes out) / d / bandwidth

    on the last ``s`` devices of the line, the stage on the first ``d`` of them; infinite where
    parameters, optimizer and ``ceil(s / d)`` micro-batches do not fit, with recompute if need be,
    which adds the forward to the load. The factor 4 is that of PipeDream's parameter server.
    Bandwidths are those of our links: the slowest between neighbours of the line inside the stage,
    and those between its first and last device and their neighbours outside. ``deep`` counts
    as many micro-batches as ``schedule`` keeps if every later device is a stage of its own.
    """
    micro_batches = arrays.problem.global_batch // size
    links = link_arrays(arrays.problem.cluster, line.order)
    crossing_bytes = arrays.activations[0] + size * arrays.activations[1]
    value = np.full((arrays.layers + 1, line.blocks + 1), inf)
    value[arrays.layers, line.blocks] = 0.0
    choice = np.full(value.shape, -1, dtype=np.int64)
    for position in reversed(range(line.blocks)):
        for number, width in enumerate(line.widths):
            if position + width > line.blocks:
                continue
            window = arrays.window(line.devices(position, width), size)
            compiled(extend_prefixes)(
                value,
                choice,
                arrays.prefix,
                arrays.held_bytes,
                arrays.parameter_bytes,
                arrays.inputs,
                arrays.workspaces,
                window.kinds,
                window.crowd,
                messages_s(links, line, position, width, crossing_bytes),
                sync_s_per_byte(links, line, position, width) / micro_batches,
                in_flight(line, position, width, micro_batches, schedule, deep=deep),
                position,
                width,
                number,
                arrays.recompute_mode,
            )
    return value, choice


def messages_s(
    links: LinkArrays, line: DeviceLine, position: int, width: int, crossing_bytes: Floats
) -> Floats:
    """Seconds of a stage's messages of a micro-batch, both ways, for every run of layers."""
    first, last = position * line.block, (position + width) * line.block - 1
    s_per_byte = links.s_per_byte
    before = s_per_byte[first - 1, first] if first > 0 else 0.0
    after = s_per_byte[last, last + 1] if last + 1 < len(line.order) else 0.0
    replicas = width * line.block
    return 2 * (crossing_bytes[:, None] * before + crossing_bytes[None, :] * after) / replicas


def sync_s_per_byte(links: LinkArrays, line: DeviceLine, position: int, width: int) -> float:
    """Seconds per byte of parameters to bring the replicas of a stage together once."""
    replicas = width * line.block
    if replicas == 1:
        return 0.0
    inside = np.arange(position * line.block, (position + width) * line.block)
    slowest = float(links.s_per_byte[inside[:-1], inside[1:]].max())
    return 4 * (replicas - 1) / replicas * slowest


def in_flight(
    line: DeviceLine, position: int, width: int, micro_batches: int, schedule: str, *, deep: bool
) -> int:
    """Micro-batches that the window's stage is taken to keep."""
    to_the_end = line.blocks - position
    if deep:
        return depth_function(schedule)(to_the_end - width + 1, micro_batches)
    return min(ceil(to_the_end / width), micro_batches)


def plan_of(
    arrays: ProfileArrays,
    line: DeviceLine,
    size: int,
    schedule: str,
    choice: Integers,
    position: int,
) -> Plan:
    """The plan behind ``choice`` for the whole chain on the blocks from ``position`` on."""
    problem = arrays.problem
    found: list[Stage] = []
    lo = 0
    while lo < arrays.layers:
        hi, number = divmod(int(choice[lo, position]), NUMBERS)
        devices = line.devices(position, line.widths[number])
        layers = range(arrays.cuts[lo], arrays.cuts[hi])
        found.append(Stage(layers, devices, rows_by_speed(problem.cluster, devices, size)))
        lo, position = hi, position + line.widths[number]
    plan = Plan(tuple(found), problem.global_batch // size, size, schedule)
    return with_needed_recompute(problem, plan)
