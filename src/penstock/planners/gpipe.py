"""GPipe's planner: balanced consecutive blocks of layers, one device for each."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from penstock.core.native import WindowLoad
from penstock.costs.fit import with_needed_recompute
from penstock.costs.stage_costs import depth_function, estimate_s
from penstock.costs.tables import ChainCosts, whole_chain
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem, RecomputeChoice, Score
from penstock.planners.choice import Candidate, best_candidate
from penstock.planners.coarse_chain import DeviceLine, few_sizes, windows_of_line
from penstock.planners.slowest_stage import SlowestStage, slowest_stage

TRIES = 2

MODES: dict[RecomputeChoice, tuple[tuple[RecomputeChoice, ...], ...]] = {
    "auto": (("off", "on"), ("auto",)),
    "on": (("on",),),
    "off": (("off",),),
}
"""The recompute modes to try for each one that the problem allows; a later set if nothing fits."""


def gpipe(problem: PlanningProblem, score: Score) -> Plan:
    """GPipe's plan: no replication, blocks of equal time, all forwards before all backwards.

    There are as many stages as devices. With fewer layers than devices there are fewer stages, on
    the fastest devices in the cluster's order. Layers are cut by `balanced_blocks`. The schedule is
    'gpipe' where the problem allows it, else the first that it allows. GPipe recomputes every stage
    by default. Here plans without recompute are tried too, and ``score`` decides between the two,
    and between a few micro-batch sizes. If neither fits, only the stages that must recompute do.

    Source: Huang et al., NeurIPS 2019 (pipeline and recompute); Kim et al. 2020, torchgpipe
    (block partition of forward and backward times).
    """
    schedule = "gpipe" if "gpipe" in problem.schedules else problem.schedules[0]
    chain = whole_chain(problem)
    every_size = tuple(sorted(problem.micro_batch_sizes))
    found: list[Candidate] = []
    for sizes in dict.fromkeys((few_sizes(problem), every_size)):
        for modes in MODES[problem.recompute]:
            if not found:
                found = list(plans_of_sizes(chain, sizes, modes, schedule))
    return best_candidate(problem, found, score, planner="gpipe", tries=TRIES)


def plans_of_sizes(
    chain: ChainCosts, sizes: tuple[int, ...], modes: tuple[RecomputeChoice, ...], schedule: str
) -> Iterator[Candidate]:
    """The balanced plan for every micro-batch size and recompute mode that fits."""
    problem = chain.problem
    devices = fastest_devices(problem)
    for size in sizes:
        for mode in modes:
            table = balanced_blocks(chain, devices, size, schedule, mode)
            if table.seconds(0) < inf:
                narrowed = replace(problem, recompute=mode)
                plan = with_needed_recompute(narrowed, table.plan(0, schedule))
                yield Candidate(plan, estimate_s(problem, plan))


def fastest_devices(problem: PlanningProblem) -> tuple[int, ...]:
    """As many devices as there can be stages: the fastest, in the cluster's order."""
    layers, all_devices = len(problem.profile.layers), problem.cluster.devices
    count = min(len(all_devices), layers, problem.max_stages or layers)
    by_speed = sorted(range(len(all_devices)), key=lambda device: -all_devices[device].speed)
    return tuple(sorted(by_speed[:count]))


def balanced_blocks(
    chain: ChainCosts, devices: tuple[int, ...], size: int, schedule: str, mode: RecomputeChoice
) -> SlowestStage:
    """The chain in one block for each device, the longest block as short as possible.

    Times are forward plus backward, divided by the speed of the block's device. They are infinite
    where no partition fits in memory. torchgpipe finds its blocks by a local search, which ends
    once no block exceeds the smallest by more than the largest layer. Here the minimum is exact;
    that search comes within the largest layer of it.
    """
    micro_batches = chain.problem.global_batch // size
    depth, stages = depth_function(schedule), len(devices)
    windows = windows_of_line(chain, DeviceLine(devices, 1, (1,)), size)
    loads = [
        WindowLoad(s, depth(stages - s, micro_batches), 1, 0.0, 0.0, 0.0) for s in range(stages)
    ]
    return slowest_stage(windows, loads, mode, balanced=True)
