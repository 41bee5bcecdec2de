"""What the worker processes of the asynchronous tests run."""

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.asynchronous.asynchronous_cases import (
    OPTIMIZERS,
    as_array,
    batches_of,
    chain,
    first_weights,
    make_optimizer,
    make_schedule,
    noting,
    plan_of_stages,
)
from runtime.pipeline_cases import join

from penstock.plan.plan import Plan
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.options import Safety, Update


def pipeline(plan: Plan, optimizer: str, **options: Any) -> Pipeline:
    settings = OPTIMIZERS[optimizer]
    return Pipeline(
        chain(first_weights(len(plan.stages))),
        batches_of(1, plan.micro_batches)[0],
        plan=plan,
        optimizer=make_optimizer(settings),
        learning_rate_schedule=make_schedule(settings),
        timeout_s=60,
        **options,
    )


def histories(cases: list[tuple[str, str, int, int, int, bool, str]]) -> dict[Any, Any]:
    """Weights and metrics of this rank, by case.

    A case: method, optimizer, micro-batches, batches, replicas, recompute, transport.
    """
    join()
    found: dict[Any, Any] = {}
    for case in cases:
        method, optimizer, micro_batches, count, replicas, recompute, transport = case
        stages = dist.get_world_size() // replicas
        plan = plan_of_stages(stages, method, micro_batches, replicas=replicas, recompute=recompute)
        safety, update = Safety(transport=transport), Update(prediction_error_every=1)
        with pipeline(plan, optimizer, safety=safety, update=update) as pipe:
            (noted,) = noting(pipe)
            metrics = list(pipe.stream(batches_of(count, micro_batches)))
            copies = next(iter(pipe.weight_versions.values())).most_copies
        found[case] = (noted, [m.loss for m in metrics], copies, metrics[-1])
    return found


def interrupted(directory: Path) -> dict[str, Any]:
    """Losses and last weights: of a run with a checkpoint in its middle, and of one from there."""
    join()
    plan = plan_of_stages(dist.get_world_size(), "spectrain", 2)
    batches = batches_of(12, 2)
    found: dict[str, Any] = {}
    with pipeline(plan, "adamw") as pipe:
        losses: list[float] = []
        for metrics in pipe.stream(batches):
            losses.append(metrics.loss)
            if metrics.step == 5:
                pipe.save(directory)
                found["saved at"] = pipe.steps
        found["through"] = (losses, weights_of(pipe))
    with pipeline(plan, "adamw") as pipe:
        start = pipe.load(directory)
        resumed = [metrics.loss for metrics in pipe.stream(batches[start:])]
        found["resumed"] = (start, resumed, weights_of(pipe))
    return found


def weights_of(pipe: Pipeline) -> np.ndarray:
    return as_array([p for _, p in pipe.named_parameters()])


def uses() -> dict[str, Any]:
    """Steps, evaluations and batches of other sizes between one another."""
    join()
    plan = plan_of_stages(dist.get_world_size(), "pipedream", 2)
    batches = batches_of(4, 2)
    found: dict[str, Any] = {}
    with pipeline(plan, "momentum", clip_norm=0.05) as pipe:
        losses: list[StepMetrics] = []
        for metrics in pipe.stream(batches[:3]):
            losses.append(metrics)
            found.setdefault("evaluated", []).append(float(pipe.evaluate(batches[0]).loss))
        found["steps"] = [m.step for m in losses]
        found["alone"] = pipe.step(batches[3]).step
        short = tuple(part[:6] for part in batches[0])
        found["short"] = [m.samples for m in pipe.stream([batches[1], short, batches[2]])]
        found["events"] = {event.kind for event in pipe.timeline().events}
        found["equal"] = pipe.verify(batches[0]).equal
    return found
