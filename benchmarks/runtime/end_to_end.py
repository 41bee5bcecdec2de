"""Our own plan, measured and chosen here, against the rival; and data parallelism alone."""

import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from cases import CASES, bounds_of
from comparing import timed
from contenders import Rival
from models import Model, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.capture.layer_graph import LayerGraph
from penstock.capture.trace import capture_model
from penstock.cluster.cluster import Cluster
from penstock.cluster.presets import local_cluster
from penstock.measure.layer_times import measure_profile
from penstock.measure.workers import median_profile
from penstock.plan.plan import Plan, Stage
from penstock.planning.answers import find_plan
from penstock.planning.planning_problem import planning_problem
from penstock.runtime.pipeline import Pipeline
from penstock.simulate.score import make_score

__all__ = ["Name", "alternated", "cluster_of_ranks", "compare_data_parallel", "compare_end_to_end"]

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
        case = CASES[name]
        bounds = bounds_of(case, model_name, len(model.blocks), dist.get_world_size())
        rival = Rival(case, make_model(model_name), bounds, micro_batches)
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
        "faster": median(b / a for a, b in zip(taken["ours"], taken[best], strict=True)),
    }


def own_plan(graph: LayerGraph, model: Model, micro_batches: int) -> tuple[Plan, float]:
    """What the search finds under all schedules, with the rival's size of micro-batches.

    All ranks measure the layers at the same time, because they will also work at the same time;
    rank 0 decides.
    """
    ranks = dist.get_world_size()
    profiles: list[Any] = [None] * ranks
    dist.all_gather_object(profiles, measure_profile(graph, model.batch(1), repeats=7))
    chosen: list[Any] = [None]
    if dist.get_rank() == 0:
        problem = planning_problem(
            median_profile(profiles),
            cluster_of_ranks(ranks),
            model.rows * micro_batches,
            micro_batch_size=model.rows,
            planner="search",
            recompute="off",
        )
        score = make_score(problem)
        plan = find_plan(problem, "search", score)
        chosen = [(plan, score(plan))]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def cluster_of_ranks(ranks: int) -> Cluster:
    """This host with a worker for each rank, all its memory, and cores for all of them."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return local_cluster(ranks, max(ranks, os.cpu_count() or 1), memory_bytes)


def compare_data_parallel(model_name: str, micro_batches: int, rounds: int) -> dict[str, Any]:
    """One stage on every rank against DistributedDataParallel, with equal micro-batches.

    Each rank computes its share of the micro-batches, and gradients are summed once, behind the
    last backward. Both start from gradients of zero; neither takes an optimizer step.
    """
    model, rank, ranks = make_model(model_name), dist.get_rank(), dist.get_world_size()
    batch = model.batch(micro_batches)
    graph = capture_model(
        nn.Sequential(*model.blocks), model.batch(ranks), loss=model.loss, granularity="block"
    )
    stage = Stage(range(len(graph.layer_names)), tuple(range(ranks)), (model.rows,) * ranks)
    own_count, rows = micro_batches // ranks, model.rows
    plan = Plan((stage,), own_count, rows * ranks, "1f1b")
    pipe = Pipeline(graph, plan, model.batch(ranks), verify="off")
    wrapped = DistributedDataParallel(nn.Sequential(*make_model(model_name).blocks))

    def rival() -> None:
        parts = [tensor.split(rows)[rank::ranks] for tensor in batch]
        for number, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            with nullcontext() if number == own_count - 1 else wrapped.no_sync():
                (model.loss(wrapped(inputs), targets) / own_count).backward()

    taken = alternated(
        {
            "ours": (lambda: None, lambda: pipe.step(batch)),
            "rival": (wrapped.zero_grad, rival),
        },
        rounds,
    )
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
