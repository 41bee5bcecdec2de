"""Our own plan, measured and chosen here, against the rivals; and data parallelism alone."""

import gc
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import combinations, pairwise
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from cases import CASES, Case, placement_of, plan_of
from comparing import timed
from contenders import Rival
from models import Model, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.cluster import Cluster, Host
from penstock.cluster.toml_file import local_cluster
from penstock.measure.layer_times import measure_profile
from penstock.measure.links import cluster_of, measure_pairs
from penstock.measure.workers import profile_and_speeds
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PREDICTION_ERROR, SHARED_CORES_ERROR
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan

Name = TypeVar("Name")
"""What a contender is told apart by."""

Batch = tuple[torch.Tensor, torch.Tensor]

CORES = os.cpu_count() or 1

MOST_CUTS = 60
"""How many cuts of the rival's model are simulated."""


def compare_end_to_end(
    model_name: str, micro_batches: int, iterations: int, rivals: list[str], fsdp: bool = True
) -> dict[str, Any]:
    """One round: a profile, our plans for it, and the rivals, in turns in the same processes.

    All messages go through Gloo, and all have the same micro-batches. ``once`` is our plan for
    devices with no more memory than the rival's 1F1B needs, as simulated. ``free`` is our plan for
    all memory; its rivals are ``ddp`` and ``fsdp``, which compute every layer on every rank. Both
    of ours are what `penstock train` chooses; ``fastest`` is predicted to be the fastest with the
    memory of ``once``, by however little. The rival's schedules are cut between the halves of
    blocks. Ratios are medians of pairs; above 1 we are faster. Under ``work`` the ranks share the
    micro-batches and exchange nothing, so no order of the same work can be faster.
    """
    os.sched_setaffinity(0, range(CORES))
    model, ranks = make_model(model_name), dist.get_world_size()
    batch = model.batch(micro_batches)
    graph = capture_model(
        nn.Sequential(*model.halves()), model.batch(1), loss=model.loss, granularity="module"
    )
    profile, cluster = costs_of_ranks(graph, model)
    cuts = {
        name: best_cut(CASES[name], graph.layer_names, profile, cluster, micro_batches, model.rows)
        for name in rivals
    }
    rival_bytes = {
        name: peak_bytes(
            plan_of(CASES[name], cut, graph.layer_names, ranks, micro_batches, model.rows),
            profile,
            cluster,
        )
        for name, cut in cuts.items()
    }
    needed = rival_bytes["1f1b"]
    margin = SHARED_CORES_ERROR if cluster.slowing_hosts else PREDICTION_ERROR
    whole = cluster.devices[0].memory_bytes
    asked = {"once": (needed, margin), "free": (whole, margin), "fastest": (needed, 0.0)}
    contenders: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    plans: dict[str, dict[str, Any]] = {}
    pipes: list[Pipeline] = []
    for name, (limit, as_fast) in asked.items():
        plan, predicted_s = planned(
            profile, with_memory(cluster, limit), micro_batches, model.rows, as_fast
        )
        source = nn.Sequential(*make_model(model_name).halves())
        safety = Safety(transport="process-groups")
        pipe = Pipeline(
            source, model.batch(1), plan=plan, loss=model.loss, safety=safety, verify="off"
        )
        pipes.append(pipe)
        contenders[name] = (lambda: None, lambda pipe=pipe: pipe.step(batch))
        plans[name] = {
            "schedule": plan.schedule,
            "stages": [[s.layers.start, s.layers.stop, *s.devices] for s in plan.stages],
            "predicted_s": predicted_s,
            "peak_bytes": peak_bytes(plan, profile, cluster),
        }
    for name in rivals:
        other = make_model(model_name)
        rival = Rival(CASES[name], replace(other, blocks=other.halves()), cuts[name], micro_batches)
        contenders[name] = (rival.prepare, lambda rival=rival: rival.step(batch))
    contenders["ddp"] = data_parallel_rival(make_model(model_name), batch)
    contenders["work"] = shared_work(make_model(model_name), batch)
    if fsdp:
        contenders["fsdp"] = fully_sharded_rival(make_model(model_name), batch)
    taken = alternated(contenders, iterations)
    for pipe in pipes:
        pipe.close()
    seconds = {name: median(values) for name, values in taken.items()}
    best = min(rivals, key=seconds.__getitem__)
    replicas = [name for name in ("ddp", "fsdp") if name in seconds]
    return {
        "model": model_name,
        "ranks": ranks,
        "micro_batches": micro_batches,
        "iterations": iterations,
        "limit_bytes": needed,
        "rival_bytes": rival_bytes,
        "plans": plans,
        "cuts": {name: [bounds.stop for bounds in cuts[name][:-1]] for name in rivals},
        "seconds": seconds,
        "best_rival": best,
        "equal_memory": ratio_of(taken[best], taken["once"]),
        "can_be_won": ratio_of(taken[best], taken["work"]),
        "fastest": ratio_of(taken["once"], taken["fastest"]),
        "best_replicas": min(replicas, key=seconds.__getitem__),
        "all_memory": min(ratio_of(taken[name], taken["free"]) for name in replicas),
    }


def ratio_of(theirs: list[float], ours: list[float]) -> float:
    """How many times as fast ours were: the median over iterations that were taken in turns."""
    return median(b / a for a, b in zip(ours, theirs, strict=True))


def peak_bytes(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """The most bytes of a device, as simulated; the benchmark takes no optimizer step."""
    found = simulate_plan(plan, profile, cluster, optimizer_bytes_per_parameter_byte=0.0)
    return max(found.peak_memory_bytes)


def costs_of_ranks(graph: LayerGraph, model: Model) -> tuple[ModelProfile, Cluster]:
    """What layers and links take, measured by all ranks at the same time, as a job does it."""
    cluster = cluster_of(*measure_pairs("cpu"))
    dist.barrier()
    shared = dist.get_world_size() > CORES
    own = measure_profile(graph, model.batch(1), repeats=7, shares_cores=shared)
    profiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(profiles, own)
    return profile_and_speeds(profiles, cluster)


def planned(
    profile: ModelProfile, cluster: Cluster, micro_batches: int, rows: int, as_fast: float
) -> tuple[Plan, float]:
    """The plan of rank 0, the simplest of those that are as fast, and its predicted seconds."""

    def made() -> tuple[Plan, float]:
        problem = planning_problem(
            profile,
            cluster,
            rows * micro_batches,
            micro_batch_size=rows,
            planner="search",
            recompute="off",
            optimizer_bytes_per_parameter_byte=0.0,
            memory_reserve=0.0,
            as_fast=as_fast,
        )
        score = make_score(problem)
        plan = find_plan(problem, "search", score)
        return plan, score(plan)

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
    placement = placement_of(case, ranks)

    def bounds_at(cut: Sequence[int]) -> list[range]:
        return [range(*ends) for ends in pairwise((0, *cut, count))]

    def busiest_s(cut: Sequence[int]) -> float:
        loads = [0.0] * ranks
        for stage, modules in enumerate(bounds_at(cut)):
            loads[placement[stage]] += sum(costs[module] for module in modules)
        return max(loads)

    def simulated_s(cut: Sequence[int]) -> float:
        plan = plan_of(case, bounds_at(cut), layer_names, ranks, micro_batches, rows)
        found = simulate_plan(plan, profile, cluster, optimizer_bytes_per_parameter_byte=0.0)
        return found.iteration_s

    def made() -> list[range]:
        cuts = nsmallest(MOST_CUTS, combinations(range(1, count), stages - 1), key=busiest_s)
        return bounds_at(min(cuts, key=simulated_s))

    return of_first_rank(made)


def of_first_rank(make: Callable[[], Name]) -> Name:
    """What rank 0 makes, on all ranks."""
    found: list[Any] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def cluster_of_ranks(ranks: int, memory_bytes: int = 0) -> Cluster:
    """This host with a worker for each rank, cores for all, and memory (0: all that there is).

    The ranks share the memory evenly.
    """
    found = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return local_cluster(ranks, max(ranks, os.cpu_count() or 1), found)


def compare_data_parallel(model_name: str, micro_batches: int, rounds: int) -> dict[str, Any]:
    """One stage on every rank against DistributedDataParallel, with equal micro-batches.

    Each rank computes its share of the micro-batches, and gradients are summed once, behind the
    last backward. Both start from gradients of zero; neither takes an optimizer step.
    """
    model, ranks = make_model(model_name), dist.get_world_size()
    batch = model.batch(micro_batches)
    graph = capture_model(
        nn.Sequential(*model.blocks), model.batch(ranks), loss=model.loss, granularity="block"
    )
    stage = Stage(range(len(graph.layer_names)), tuple(range(ranks)), (model.rows,) * ranks)
    own_count, rows = micro_batches // ranks, model.rows
    plan = Plan((stage,), own_count, rows * ranks, "1f1b")
    pipe = Pipeline(graph, model.batch(ranks), plan=plan, verify="off")
    rival = data_parallel_rival(make_model(model_name), batch)
    ours = (lambda: None, lambda: pipe.step(batch))
    taken = alternated({"ours": ours, "rival": rival}, rounds)
    pipe.close()
    return {
        "model": model_name,
        "micro_batches": micro_batches,
        "rounds": rounds,
        "ours_s": median(taken["ours"]),
        "rival_s": median(taken["rival"]),
        "iteration_ratio": median(
            a / b for a, b in zip(taken["ours"], taken["rival"], strict=True)
        ),
    }


def data_parallel_rival(
    model: Model, batch: Batch
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What prepares and takes a step of DistributedDataParallel, with one sum of gradients."""
    wrapped = DistributedDataParallel(nn.Sequential(*model.blocks))

    def step() -> None:
        *before, last = own_micro_batches(model, batch)
        with wrapped.no_sync():
            for inputs, targets in before:
                (model.loss(wrapped(inputs), targets) / (len(before) + 1)).backward()
        (model.loss(wrapped(last[0]), last[1]) / (len(before) + 1)).backward()

    return wrapped.zero_grad, step


def shared_work(model: Model, batch: Batch) -> tuple[Callable[[], None], Callable[[], None]]:
    """The same without the sum: each rank computes its share of the micro-batches, for itself."""
    whole = nn.Sequential(*model.blocks)

    def step() -> None:
        own = own_micro_batches(model, batch)
        for inputs, targets in own:
            (model.loss(whole(inputs), targets) / len(own)).backward()

    return whole.zero_grad, step


def own_micro_batches(model: Model, batch: Batch) -> list[tuple[torch.Tensor, ...]]:
    """This rank's share of the micro-batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return list(zip(*(part.split(model.rows)[rank::ranks] for part in batch), strict=True))


def fully_sharded_rival(
    model: Model, batch: Batch
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The same with FSDP2: every block divides its parameters over all ranks."""
    whole = nn.Sequential(*model.blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    sharded = fully_shard(whole, mesh=mesh)

    def step() -> None:
        own = own_micro_batches(model, batch)
        for number, (inputs, targets) in enumerate(own, start=1):
            sharded.set_requires_gradient_sync(number == len(own))
            (model.loss(sharded(inputs), targets) / len(own)).backward()

    return whole.zero_grad, step


def alternated(
    contenders: dict[Name, tuple[Callable[[], object], Callable[[], object]]], rounds: int
) -> dict[Name, list[float]]:
    """Seconds of each contender's iterations, after one that is not counted."""
    taken: dict[Name, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, (prepare, step) in contenders.items():
            prepare()
            gc.collect()
            seconds = timed(step)
            if number:
                taken[name].append(seconds)
    return taken
