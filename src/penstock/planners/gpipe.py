"""GPipe's planner: balanced consecutive blocks of layers, one device for each."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from penstock.kernels import compiled
from penstock.plan.candidate import Candidate
from penstock.plan.cost import depth_function, estimate_s
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, RecomputeChoice, Score
from penstock.planners.gpipe_kernels import balanced_ends
from penstock.planners.spp.arrays import ProfileArrays, few_sizes
from penstock.planners.spp.choice import best_of_few, with_needed_recompute

__all__ = ["balanced_cuts", "gpipe"]

TRIES = 2
AUTO, ALWAYS, NEVER = 0, 1, 2


def gpipe(problem: PlanningProblem, score: Score) -> Plan:
    """GPipe's plan: no replication, blocks of equal time, all forwards before all backwards.

    As many stages as devices, or fewer where there are fewer layers; where they are fewer, the
    fastest devices in the cluster's order. Layers are cut by `balanced_cuts`. The schedule is
    'gpipe' where the problem allows it, else the first that it allows. GPipe recomputes every
    stage by default; here plans without any recompute stand beside, and ``score`` decides between
    the two and between a few micro-batch sizes; some stages with and some without only where
    neither fits.

    Source: Huang et al., NeurIPS 2019 (pipeline and recompute); Kim et al. 2020, torchgpipe
    (block partition of forward and backward times).

    Raises:
        Infeasible: no plan fits; the message says what would.
    """
    schedule = "gpipe" if "gpipe" in problem.schedules else problem.schedules[0]
    arrays = ProfileArrays(problem, tuple(range(len(problem.profile.layers) + 1)))
    modes = {"auto": ((NEVER, ALWAYS), (AUTO,)), "on": ((ALWAYS,),), "off": ((NEVER,),)}
    every_size = tuple(sorted(problem.micro_batch_sizes))
    found: list[Candidate] = []
    for sizes in dict.fromkeys((few_sizes(problem), every_size)):
        for chosen in modes[problem.recompute]:
            if not found:
                found = list(candidates(arrays, sizes, chosen, schedule))
    return best_of_few(problem, found, score, planner="gpipe", tries=TRIES)


def candidates(
    arrays: ProfileArrays, sizes: tuple[int, ...], modes: tuple[int, ...], schedule: str
) -> Iterator[Candidate]:
    """The balanced plan for every micro-batch size and recompute mode that fits."""
    problem = arrays.problem
    devices = fastest_devices(problem)
    for size in sizes:
        for mode in modes:
            if cuts := balanced_cuts(arrays, devices, size, schedule, mode):
                stages = tuple(
                    Stage(range(lo, hi), (device,), (size,))
                    for lo, hi, device in zip(cuts, cuts[1:], devices, strict=False)
                )
                plan = Plan(stages, problem.global_batch // size, size, schedule)
                plan = with_recompute(problem, plan, mode)
                yield Candidate(plan, estimate_s(problem, plan))


def fastest_devices(problem: PlanningProblem) -> tuple[int, ...]:
    """As many devices as there can be stages: the fastest, in the cluster's order."""
    layers, all_devices = len(problem.profile.layers), problem.cluster.devices
    count = min(len(all_devices), layers, problem.max_stages or layers)
    by_speed = sorted(range(len(all_devices)), key=lambda device: -all_devices[device].speed)
    return tuple(sorted(by_speed[:count]))


def balanced_cuts(
    arrays: ProfileArrays, devices: tuple[int, ...], size: int, schedule: str, mode: int
) -> tuple[int, ...]:
    """Cuts of the chain into one block for each device, the longest block as short as possible.

    Times are forward plus backward, divided by the speed of the block's device; empty where no
    partition fits in memory. torchgpipe finds its blocks by a local search that ends once no
    block exceeds the smallest by more than the largest layer; this is the exact minimum instead,
    of which that search comes within the largest layer.
    """
    micro_batches = arrays.problem.global_batch // size
    depth = depth_function(schedule)
    windows = [arrays.window((device,), size) for device in devices]
    ends = compiled(balanced_ends)(
        arrays.prefix,
        arrays.held_bytes,
        arrays.inputs,
        arrays.workspaces,
        np.concatenate([window.kinds for window in windows]),
        1.0,
        np.array([depth(len(devices) - s, micro_batches) for s in range(len(devices))]),
        mode,
    )
    return (0, *map(int, ends)) if ends[-1] >= 0 else ()


def with_recompute(problem: PlanningProblem, plan: Plan, mode: int) -> Plan:
    """The plan with recompute on all stages, on none, or on those that do not fit without."""
    choices: dict[int, RecomputeChoice] = {AUTO: "auto", ALWAYS: "on", NEVER: "off"}
    return with_needed_recompute(replace(problem, recompute=choices[mode]), plan)
