"""A planned pipeline against what its users would run instead, in turns in the same processes."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import combinations, pairwise
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch.distributed as dist
from cases import CASES as SCHEDULES
from cases import Case, placement_of, plan_of
from contenders import Rival
from models import Chain, Model
from replicas import (
    Contender,
    alternated,
    data_parallel_rival,
    fully_sharded_rival,
    shared_work,
)
from unequal_cases import CASES

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.cluster import Cluster, Host
from penstock.measure.layer_times import measure_profile
from penstock.plan.plan import Plan
from penstock.plan.problem import PREDICTION_ERROR, SHARED_CORES_ERROR
from penstock.plan_here import costs_of_ranks
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.heartbeat import LIMIT_S
from penstock.runtime.processes.world import join_world
from penstock.simulate.score import make_score
from penstock.simulate.simulation import Prediction, simulate_plan
from penstock.timeline.drift import part_seconds
from penstock.timeline.metrics import busy_s, iteration_s, working_devices
from penstock.timeline.timeline import Timeline

Found = TypeVar("Found")

TUNED = ("1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v")
"""Torch's schedules, of which the fastest counts."""

CORES = os.cpu_count() or 1

MOST_CUTS = 60
"""The number of cuts of the rival's model that are simulated."""


def compare_case(name: str, rounds: int, iterations: int) -> dict[str, Any]:
    """Rounds of a case: a profile, our plans for it, and the rivals; every rank calls.

    All messages go through Gloo, and all have the same micro-batches. ``ours`` is the plan for
    devices with no more memory than the fastest of torch's schedules needs, ``free`` the plan for
    all memory, which may be copies; both are what `penstock train` chooses. ``equal`` is torch's
    1F1B with equal numbers of blocks. ``ddp`` and ``fsdp`` compute every layer on every rank, and
    so does ``work``, where ranks exchange nothing: no order of the same work can be faster. A ratio
    is the median of pairs; above 1 we are faster.
    """
    os.sched_setaffinity(0, range(CORES))
    case, ranks = CASES[name], dist.get_world_size()
    model, count = case.make(), case.micro_batches
    batch = model.batch(count)
    graph = capture_model(
        Chain(*model.halves()), model.batch(1), loss=model.loss, granularity="module"
    )
    start_s = perf_counter()
    profile, cluster = measured_costs(graph, model)
    profile_s = perf_counter() - start_s
    cuts = {
        name: best_cut(SCHEDULES[name], graph.layer_names, profile, cluster, count, model.rows)
        for name in TUNED
    }
    rival_plans = {
        name: plan_of(SCHEDULES[name], cut, graph.layer_names, ranks, count, model.rows)
        for name, cut in cuts.items()
    }
    rivals = {name: simulated(plan, profile, cluster) for name, plan in rival_plans.items()}
    fastest = min(rivals.values(), key=lambda found: found.iteration_s)
    contenders: dict[str, Contender] = {}
    plans: dict[str, dict[str, Any]] = {}
    pipes: dict[Plan, Pipeline] = {}
    most_bytes = max(fastest.peak_memory_bytes)
    limits = {"ours": most_bytes, "free": cluster.devices[0].memory_bytes}
    predicted: dict[Plan, Prediction] = {}
    for which, limit in limits.items():
        start_s = perf_counter()
        own = with_memory(cluster, limit)
        plan, predicted_s = planned(profile, own, count, model.rows, copies=which == "free")
        planning_s = perf_counter() - start_s
        pipe = pipes.get(plan)
        if pipe is None:
            predicted[plan] = simulated(plan, profile, cluster)
            pipe = pipes[plan] = Pipeline(
                Chain(*case.make().halves()),
                model.batch(1),
                plan=plan,
                loss=model.loss,
                # The loss is checked in steps 1, 2, 4, 8 and so on: hardly ever in a long run.
                safety=Safety(transport="process-groups", idle_ranks=True, check_loss=False),
                verify="off",
            )
        contenders[which] = (lambda: None, lambda pipe=pipe: pipe.step(batch))
        plans[which] = {
            "schedule": plan.schedule,
            "stages": [[s.layers.start, s.layers.stop, *s.devices] for s in plan.stages],
            "predicted_s": predicted_s,
            "planning_s": planning_s,
            "peak_bytes": max(predicted[plan].peak_memory_bytes),
        }
    for schedule in TUNED:
        other = case.make()
        rival = Rival(
            SCHEDULES[schedule], replace(other, blocks=other.halves()), cuts[schedule], count
        )
        contenders[schedule] = (rival.prepare, lambda rival=rival: rival.step(batch))
    equal = Rival(SCHEDULES["1f1b"], case.make(), even_cut(len(model.blocks), ranks), count)
    contenders["equal"] = (equal.prepare, lambda: equal.step(batch))
    contenders["ddp"] = data_parallel_rival(case.make(), batch)
    contenders["work"] = shared_work(case.make(), batch)
    if not case.link_bytes_per_s:
        # It gathers every layer in every pass: 20 s an iteration over the slow link.
        contenders["fsdp"] = fully_sharded_rival(case.make(), batch)
    taken = alternated(contenders, rounds * iterations)
    for which, (plan, pipe) in zip(plans, pipes.items(), strict=False):
        plans[which]["actions"] = action_times(predicted[plan].timeline, pipe.timeline())
    for pipe in pipes.values():
        pipe.close()
    return {
        "profile_s": profile_s,
        "limit_bytes": most_bytes,
        "rivals": {
            name: {
                "predicted_s": found.iteration_s,
                "peak_bytes": max(found.peak_memory_bytes),
                "cut": [bounds.stop for bounds in cuts[name][:-1]],
            }
            for name, found in rivals.items()
        },
        "plans": plans,
        "rounds": [
            compared({name: values[at : at + iterations] for name, values in taken.items()})
            for at in range(0, rounds * iterations, iterations)
        ],
    }


def compared(taken: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of a round's iterations, the fastest rivals, and how many times as fast we are."""
    seconds = {name: median(values) for name, values in taken.items()}
    best = min(TUNED, key=seconds.__getitem__)
    copies = min(("ddp", "fsdp"), key=lambda name: seconds.get(name, float("inf")))
    return {
        "seconds": seconds,
        "best_torch": best,
        "best_copies": copies,
        "over_equal": ratio_of(taken["equal"], taken["ours"]),
        "over_torch": ratio_of(taken[best], taken["ours"]),
        "over_copies": ratio_of(taken[copies], taken["free"]),
        "at_most": ratio_of(taken[best], taken["work"]),
    }


def action_times(predicted: Timeline, measured: Timeline) -> dict[str, Any]:
    """Seconds of an iteration, predicted and measured: of all, and of the busiest device.

    ``factors`` say how many times as long as predicted each stage computed on each device.
    """
    planned, taken = part_seconds(predicted), part_seconds(measured)
    common = [part for part, seconds in planned.items() if seconds and part in taken]

    def seconds(timeline: Timeline) -> dict[str, float]:
        busiest_s = max(busy_s(timeline, device) for device in working_devices(timeline))
        return {"iteration": iteration_s(timeline), "busiest": busiest_s}

    return {
        "predicted": seconds(predicted),
        "measured": seconds(measured),
        "factors": {str(part): taken[part] / planned[part] for part in common},
    }


def ratio_of(theirs: list[float], ours: list[float]) -> float:
    """Speed of ours as a multiple: the median over iterations that were taken in turns."""
    return median(b / a for a, b in zip(ours, theirs, strict=True))


def even_cut(blocks: int, ranks: int) -> list[range]:
    """As many blocks on every rank, as far as they can be divided."""
    ends = [blocks * rank // ranks for rank in range(ranks + 1)]
    return [range(*bounds) for bounds in pairwise(ends)]


def simulated(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Prediction:
    """An iteration of the benchmark, which takes no optimizer step."""
    return simulate_plan(plan, profile, cluster, optimizer_bytes_per_parameter_byte=0.0)


def measured_costs(graph: LayerGraph, model: Model) -> tuple[ModelProfile, Cluster]:
    """Costs of layers and links, measured by all ranks as a job does it, on all ranks."""
    world = join_world("cpu", LIMIT_S)
    batch = model.batch(1)
    costs = costs_of_ranks(world, lambda cluster: measure_profile(graph, batch, repeats=7))
    world.leave()
    return of_first_rank(lambda: costs)


def planned(
    profile: ModelProfile, cluster: Cluster, micro_batches: int, rows: int, *, copies: bool
) -> tuple[Plan, float]:
    """The plan of rank 0, the simplest of those that are as fast, and its predicted seconds.

    Among them are ``copies`` of the model, if wanted, each with micro-batches of ``rows``.
    """
    as_fast = SHARED_CORES_ERROR if cluster.slowing_hosts else PREDICTION_ERROR

    def found(planner: str, size: int) -> tuple[Plan, float]:
        problem = planning_problem(
            profile,
            cluster,
            rows * micro_batches,
            micro_batch_size=size,
            planner=planner,
            recompute="off",
            optimizer_bytes_per_parameter_byte=0.0,
            memory_reserve=0.0,
            as_fast=as_fast,
        )
        score = make_score(problem)
        plan = find_plan(problem, planner, score)
        return plan, score(plan)

    def made() -> tuple[Plan, float]:
        searched = found("search", rows)
        copied = found("data-parallel", rows * len(cluster.devices)) if copies else searched
        return copied if copied[1] <= searched[1] * (1 + as_fast) else searched

    return of_first_rank(made)


def with_memory(cluster: Cluster, rank_bytes: float) -> Cluster:
    """The cluster with so much memory on each device."""

    def on(host: Host) -> Host:
        devices = [replace(device, memory_bytes=rank_bytes) for device in host.devices]
        return replace(host, devices=tuple(devices))

    return replace(cluster, hosts=tuple(map(on, cluster.hosts)))


def best_cut(
    case: Case,
    layer_names: Sequence[str],
    profile: ModelProfile,
    cluster: Cluster,
    micro_batches: int,
    rows: int,
) -> list[range]:
    """The rival's modules of each stage, cut as is fastest by our simulator.

    Of all cuts, the `MOST_CUTS` with the least work on the busiest rank are simulated.
    """
    ranks = len(cluster.devices)
    numbers = [name.partition(".")[0] for name in layer_names]
    count = max(int(number) for number in numbers if number.isdigit()) + 1
    # The loss belongs to the last module.
    owners = [int(number) if number.isdigit() else count - 1 for number in numbers]
    stages = ranks * case.chunks
    costs = [
        profile.forward_s(layers, rows) + profile.backward_s(layers, rows)
        for module in range(count)
        if (layers := range(bisect_left(owners, module), bisect_right(owners, module)))
    ]
    speeds = [device.speed for device in cluster.devices]
    placement = placement_of(case, ranks)

    def bounds_at(cut: Sequence[int]) -> list[range]:
        return [range(*ends) for ends in pairwise((0, *cut, count))]

    def busiest_s(cut: Sequence[int]) -> float:
        loads = [0.0] * ranks
        for stage, modules in enumerate(bounds_at(cut)):
            loads[placement[stage]] += sum(costs[module] for module in modules)
        return max(load / speed for load, speed in zip(loads, speeds, strict=True))

    def simulated_s(cut: Sequence[int]) -> float:
        plan = plan_of(case, bounds_at(cut), layer_names, ranks, micro_batches, rows)
        return simulated(plan, profile, cluster).iteration_s

    def made() -> list[range]:
        cuts = nsmallest(MOST_CUTS, combinations(range(1, count), stages - 1), key=busiest_s)
        return bounds_at(min(cuts, key=simulated_s))

    return of_first_rank(made)


def of_first_rank(make: Callable[[], Found]) -> Found:
    """The result of a function on rank 0, on all ranks."""
    found: list[Any] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]
