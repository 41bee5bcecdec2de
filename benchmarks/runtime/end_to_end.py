"""Our own plan, measured and chosen here, against the rivals; and data parallelism alone."""

import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from cases import CASES, bounds_of, plan_of
from comparing import timed
from contenders import Rival
from models import Model, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import local_cluster
from penstock.measure.layer_times import measure_profile
from penstock.measure.workers import median_profile
from penstock.plan.plan import Plan, Stage
from penstock.planning.answers import find_plan
from penstock.planning.planning_problem import planning_problem
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.settings import Safety
from penstock.simulate.score import make_score
from penstock.simulate.simulation import simulate_plan

__all__ = [
    "Name",
    "alternated",
    "cluster_of_ranks",
    "compare_data_parallel",
    "compare_end_to_end",
    "compare_equal",
]

Name = TypeVar("Name")
"""What a contender is told apart by."""

Batch = tuple[torch.Tensor, torch.Tensor]


def compare_end_to_end(
    model_name: str, micro_batches: int, iterations: int, rivals: list[str]
) -> dict[str, Any]:
    """One round: a profile, our plan for it, and the rival's schedules, in one run.

    The rival's schedules have their best cuts between blocks. Iterations of all are taken in turns.
    """
    model = make_model(model_name)
    batch = model.batch(micro_batches)
    graph = capture_model(
        nn.Sequential(*model.blocks), model.batch(1), loss=model.loss, granularity="module"
    )
    plan, predicted_s = own_plan(graph, model, micro_batches)
    pipe = Pipeline(graph, plan, model.batch(1), verify="off")
    contenders: dict[str, tuple[Callable[[], None], Callable[[], object]]] = {
        "ours": (lambda: None, lambda: pipe.step(batch))
    }
    for name in rivals:
        rival = rival_of(name, model_name, micro_batches)
        contenders[name] = (rival.prepare, lambda rival=rival: rival.step(batch))
    taken = alternated(contenders, iterations)
    pipe.close()
    best = min(rivals, key=lambda name: median(taken[name]))
    return {
        "model": model_name,
        "micro_batches": micro_batches,
        "iterations": iterations,
        "plan": {
            "schedule": plan.schedule,
            "stages": [[s.layers.start, s.layers.stop, *s.devices] for s in plan.stages],
            "cut_after": [graph.layer_names[s.layers.stop - 1] for s in plan.stages[:-1]],
        },
        "predicted_s": predicted_s,
        "seconds": {name: median(values) for name, values in taken.items()},
        "best_rival": best,
        "faster": ratio_of(taken[best], taken["ours"]),
    }


def compare_equal(
    model_name: str, micro_batches: int, iterations: int, rivals: list[str]
) -> dict[str, Any]:
    """One round at equal transport (Gloo for all), and at equal memory.

    ``once`` is our plan for devices with no more memory than the rival's 1F1B needs with its own
    cuts, as simulated. ``free`` is our plan for all memory; its rival is ``ddp``,
    DistributedDataParallel, which holds every layer on every rank too. Ratios are of medians of
    pairs; above 1 we are faster.
    """
    model, ranks = make_model(model_name), dist.get_world_size()
    batch = model.batch(micro_batches)
    graph = capture_model(
        nn.Sequential(*model.blocks), model.batch(1), loss=model.loss, granularity="module"
    )
    profile = profile_of_ranks(graph, model)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    case = CASES["1f1b"]
    bounds = bounds_of(case, model_name, len(model.blocks), ranks)
    by_hand = plan_of(case, bounds, graph.layer_names, ranks, micro_batches, model.rows)
    needed = peak_bytes(by_hand, profile, cluster_of_ranks(ranks), model)
    limits = {"once": needed, "free": whole / ranks}
    contenders: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    plans: dict[str, dict[str, Any]] = {}
    pipes: list[Pipeline] = []
    for name, limit in limits.items():
        plan, predicted_s = planned(profile, model, micro_batches, int(limit))
        source = nn.Sequential(*make_model(model_name).blocks)
        pipe = Pipeline(
            source,
            plan,
            model.batch(1),
            loss=model.loss,
            safety=Safety(transport="process-groups"),
            verify="off",
        )
        pipes.append(pipe)
        contenders[name] = (lambda: None, lambda pipe=pipe: pipe.step(batch))
        plans[name] = {
            "schedule": plan.schedule,
            "stages": [[s.layers.start, s.layers.stop, *s.devices] for s in plan.stages],
            "predicted_s": predicted_s,
            "peak_bytes": peak_bytes(plan, profile, cluster_of_ranks(ranks), model),
        }
    for name in rivals:
        rival = rival_of(name, model_name, micro_batches)
        contenders[name] = (rival.prepare, lambda rival=rival: rival.step(batch))
    contenders["ddp"] = data_parallel_rival(make_model(model_name), batch, micro_batches)
    taken = alternated(contenders, iterations)
    for pipe in pipes:
        pipe.close()
    best = min(rivals, key=lambda name: median(taken[name]))
    return {
        "model": model_name,
        "micro_batches": micro_batches,
        "iterations": iterations,
        "limit_bytes": needed,
        "plans": plans,
        "seconds": {name: median(values) for name, values in taken.items()},
        "best_rival": best,
        "equal_memory": ratio_of(taken[best], taken["once"]),
        "over_ddp": ratio_of(taken["ddp"], taken["free"]),
        "ddp_over_best_rival": ratio_of(taken[best], taken["ddp"]),
    }


def ratio_of(theirs: list[float], ours: list[float]) -> float:
    """How many times as fast ours were: the median over iterations that were taken in turns."""
    return median(b / a for a, b in zip(ours, theirs, strict=True))


def peak_bytes(plan: Plan, profile: ModelProfile, cluster: Cluster, model: Model) -> float:
    """The most bytes of a device, as simulated; the benchmark takes no optimizer step."""
    found = simulate_plan(plan, profile, cluster, optimizer_bytes_per_parameter_byte=0.0)
    return max(found.peak_memory_bytes)


def rival_of(name: str, model_name: str, micro_batches: int) -> Rival:
    """A schedule of torch with its best cuts between blocks."""
    case = CASES[name]
    model = make_model(model_name)
    bounds = bounds_of(case, model_name, len(model.blocks), dist.get_world_size())
    return Rival(case, model, bounds, micro_batches)


def own_plan(graph: LayerGraph, model: Model, micro_batches: int) -> tuple[Plan, float]:
    """What the search finds under all schedules, with the rival's size of micro-batches."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rank_bytes = whole // dist.get_world_size()
    return planned(profile_of_ranks(graph, model), model, micro_batches, rank_bytes)


def profile_of_ranks(graph: LayerGraph, model: Model) -> ModelProfile:
    """What all ranks measure at the same time, because they will also work at the same time."""
    profiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(profiles, measure_profile(graph, model.batch(1), repeats=7))
    return median_profile(profiles)


def planned(
    profile: ModelProfile, model: Model, micro_batches: int, rank_bytes: int
) -> tuple[Plan, float]:
    """The plan of rank 0 for so many bytes a rank, and its predicted seconds."""
    chosen: list[Any] = [None]
    if dist.get_rank() == 0:
        problem = planning_problem(
            profile,
            cluster_of_ranks(dist.get_world_size(), rank_bytes * dist.get_world_size()),
            model.rows * micro_batches,
            micro_batch_size=model.rows,
            planner="search",
            recompute="off",
            optimizer_bytes_per_parameter_byte=0.0,
            memory_reserve=0.0,
        )
        score = make_score(problem)
        plan = find_plan(problem, "search", score)
        chosen = [(plan, score(plan))]
    dist.broadcast_object_list(chosen)
    return chosen[0]


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
    pipe = Pipeline(graph, plan, model.batch(ranks), verify="off")
    rival = data_parallel_rival(make_model(model_name), batch, micro_batches)
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
    model: Model, batch: Batch, micro_batches: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What prepares and takes a step of DistributedDataParallel, with one sum of gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(nn.Sequential(*model.blocks))
    own_count = micro_batches // ranks

    def step() -> None:
        parts = [tensor.split(model.rows)[rank::ranks] for tensor in batch]
        for number, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            with nullcontext() if number == own_count - 1 else wrapped.no_sync():
                (model.loss(wrapped(inputs), targets) / own_count).backward()

    return wrapped.zero_grad, step


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
