"""The whole model on every rank: gradients summed, parameters divided, or nothing exchanged."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any, TypeVar

import torch.distributed as dist
from comparing import timed
from contenders import Batch
from models import Chain, Model, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline

Name = TypeVar("Name")
"""Facts that distinguish contenders."""

Contender = tuple[Callable[[], object], Callable[[], object]]
"""Functions that prepare an iteration, which is not timed, and take it."""


def compare_data_parallel(model_name: str, micro_batches: int, rounds: int) -> dict[str, Any]:
    """One stage on every rank against DistributedDataParallel, with equal micro-batches.

    Each rank computes its share of the micro-batches, and gradients are summed once, behind the
    last backward. Both start from gradients of zero; neither takes an optimizer step.
    """
    model, ranks = make_model(model_name), dist.get_world_size()
    batch = model.batch(micro_batches)
    graph = capture_model(
        Chain(*model.blocks), model.batch(ranks), loss=model.loss, granularity="block"
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


def data_parallel_rival(model: Model, batch: Batch) -> Contender:
    """DistributedDataParallel, with one sum of gradients a step."""
    wrapped = DistributedDataParallel(Chain(*model.blocks))
    return over_share(
        wrapped, model, batch, lambda last: nullcontext() if last else wrapped.no_sync()
    )


def fully_sharded_rival(model: Model, batch: Batch) -> Contender:
    """FSDP2, where every block divides its parameters over all ranks."""
    whole = Chain(*model.blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    sharded = fully_shard(whole, mesh=mesh)

    def summing(last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    return over_share(sharded, model, batch, summing)


def shared_work(model: Model, batch: Batch) -> Contender:
    """The same work without any message: each rank computes its micro-batches for itself."""
    return over_share(Chain(*model.blocks), model, batch, lambda last: nullcontext())


def over_share(
    whole: nn.Module,
    model: Model,
    batch: Batch,
    summing: Callable[[bool], AbstractContextManager[None]],
) -> Contender:
    """A step over this rank's share of the micro-batches.

    A forward and backward run within ``summing``, which learns whether they are the last.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = list(zip(*(part.split(model.rows)[rank::ranks] for part in batch), strict=True))

    def step() -> None:
        for number, (*inputs, targets) in enumerate(own, start=1):
            with summing(number == len(own)):
                (model.loss(whole(*inputs), targets) / len(own)).backward()

    return whole.zero_grad, step


def alternated(contenders: dict[Name, Contender], rounds: int) -> dict[Name, list[float]]:
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
