"""Schedules without a flush against 1F1B with one, on real ranks and as the simulator predicts."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch.distributed as dist
from cases import CASES, bounds_of, plan_of
from end_to_end import Name, alternated, cluster_of_ranks
from models import Model, make_model
from torch import nn
from torch.optim import SGD, Optimizer

from penstock.capture.capture import capture_model
from penstock.cluster.cluster import Cluster
from penstock.measure.layer_times import measure_profile, measure_step_s_per_byte
from penstock.measure.workers import median_profile
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.registry import FAMILIES
from penstock.simulate.simulation import simulate_plan

__all__ = ["compare_endless", "measured_profile", "streams_of"]

BATCHES = 4
"""Batches in a row for each measurement; without a flush the pipeline fills and drains once."""


def compare_endless(schedules: list[str], micro_batches: int, rounds: int) -> dict[str, Any]:
    """Seconds of `BATCHES` batches in a row under each schedule, in turn; measured, and simulated.

    One stage a rank, cut between blocks, SGD with momentum. The first schedule is the one that the
    others are divided by.
    """
    model, profile = make_model("gpt"), measured_profile(make_optimizer)
    pipes = {name: pipeline_of(name, model, micro_batches) for name in schedules}
    batches = [model.batch(micro_batches) for _ in range(BATCHES)]
    taken = alternated(streams_of(pipes, batches), rounds)
    ranks = dist.get_world_size()
    cluster = cluster_of_ranks(ranks)
    predicted = {name: predicted_s(pipe, profile, cluster) for name, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.close()
    first = schedules[0]
    return {
        "model": "gpt",
        "ranks": ranks,
        "micro_batches": micro_batches,
        "batches": BATCHES,
        "rounds": rounds,
        "rows": [
            {
                "schedule": name,
                "measured_s": median(taken[name]),
                "predicted_s": predicted[name],
                "times_as_fast": median(
                    a / b for a, b in zip(taken[first], taken[name], strict=True)
                ),
                "predicted_times_as_fast": predicted[first] / predicted[name],
            }
            for name in schedules
        ],
    }


def measured_profile(make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> ModelProfile:
    """The GPT-like model on these ranks, all of which measure at once."""
    model = make_model("gpt")
    graph = capture_model(
        nn.Sequential(*model.blocks), model.batch(1), loss=model.loss, granularity="block"
    )
    profiles: list[Any] = [None] * dist.get_world_size()
    step_s_per_byte = measure_step_s_per_byte(nn.Sequential(*make_model("gpt").blocks), make)
    own = measure_profile(graph, model.batch(1), repeats=7, step_s_per_byte=step_s_per_byte)
    dist.all_gather_object(profiles, own)
    return median_profile(profiles)


def pipeline_of(schedule: str, model: Model, micro_batches: int) -> Pipeline:
    """A pipeline with weights of its own."""
    blocks = make_model(model.name).blocks
    example = model.batch(1)
    graph = capture_model(nn.Sequential(*blocks), example, loss=model.loss, granularity="block")
    case = CASES["1f1b"]
    ranks = dist.get_world_size()
    bounds = bounds_of(case, model.name, len(blocks), ranks)
    plan = plan_of(case, bounds, graph.layer_names, ranks, micro_batches, model.rows, schedule)
    return Pipeline(graph, plan, example, optimizer=make_optimizer, verify="off")


def make_optimizer(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """SGD with momentum."""
    return SGD(parameters, lr=1e-4, momentum=0.9)


def predicted_s(pipe: Pipeline, profile: ModelProfile, cluster: Cluster) -> float:
    """What the simulator gives for `BATCHES` batches: one after another, or without a flush."""
    together = not FAMILIES[pipe.plan.schedule].flushes
    found = simulate_plan(
        pipe.plan,
        profile,
        cluster,
        optimizer_bytes_per_parameter_byte=1.0,
        iterations=BATCHES if together else 1,
        with_timeline=False,
    )
    if together:
        return found.iteration_s + (BATCHES - 1) * found.steady_s
    return BATCHES * found.iteration_s


def streams_of(
    pipes: Mapping[Name, Pipeline], batches: Sequence[Any]
) -> dict[Name, tuple[Callable[[], object], Callable[[], object]]]:
    """Contenders that take all steps of a stream of ``batches``, with nothing to prepare."""
    return {
        name: (lambda: None, lambda pipe=pipe: deque(pipe.stream(batches), maxlen=0))
        for name, pipe in pipes.items()
    }
