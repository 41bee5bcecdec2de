"""What an option of the pipeline costs or gains: the same steps with it and without it."""

from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as dist
from cases import CASES, bounds_of, plan_of
from end_to_end import alternated
from models import Model, make_model
from torch import nn
from torch.optim import AdamW

from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline

__all__ = ["compare_option"]


def compare_option(option: str, micro_batches: int, rounds: int) -> dict[str, Any]:
    """Iterations with ``option`` over those without, in turn in the same processes.

    ``compile`` and ``accumulate`` (the same batch in two halves, one step) on a pipeline of one
    stage a rank under 1F1B; ``shard_optimizer`` on one stage that every rank holds. All step AdamW.
    """
    model = make_model("gpt")
    batch = model.batch(micro_batches)
    halves = [tuple(leaf.chunk(2)[n] for leaf in batch) for n in range(2)]
    begin = perf_counter()
    plain = pipeline_of(model, micro_batches, replicated=option == "shard_optimizer")
    between = perf_counter()
    match option:
        case "compile":
            other = pipeline_of(model, micro_batches, compile=True)
        case "shard_optimizer":
            other = pipeline_of(model, micro_batches, replicated=True, shard_optimizer=True)
        case _:
            other = pipeline_of(model, micro_batches // 2)
    opening_s = perf_counter() - between - (between - begin)
    given = halves if option == "accumulate" else [batch]
    taken = alternated(
        {
            "with": (lambda: None, lambda: other.step(*given)),
            "without": (lambda: None, lambda: plain.step(batch)),
        },
        rounds,
    )
    state_bytes = [optimizer_bytes(pipe) for pipe in (other, plain)]
    other.close()
    plain.close()
    return {
        "option": option,
        "ranks": dist.get_world_size(),
        "micro_batches": micro_batches,
        "rounds": rounds,
        "with_s": median(taken["with"]),
        "without_s": median(taken["without"]),
        "ratio": median(a / b for a, b in zip(taken["with"], taken["without"], strict=True)),
        "opening_s": max(0.0, opening_s),
        "optimizer_bytes": state_bytes,
    }


def pipeline_of(
    model: Model,
    micro_batches: int,
    *,
    replicated: bool = False,
    compile: bool = False,
    shard_optimizer: bool = False,
) -> Pipeline:
    """A pipeline of its own weights; one stage a rank, or one that all hold."""
    whole = nn.Sequential(*make_model(model.name).blocks)
    ranks, rows = dist.get_world_size(), model.rows
    example = model.batch(ranks)
    graph = capture_model(whole, example, loss=model.loss, granularity="block", compile=compile)
    if replicated:
        stage = Stage(range(len(graph.layer_names)), tuple(range(ranks)), (rows,) * ranks)
        plan = Plan((stage,), micro_batches // ranks, rows * ranks, "1f1b")
    else:
        case = CASES["1f1b"]
        bounds = bounds_of(case, model.name, len(model.blocks), ranks)
        plan = plan_of(case, bounds, graph.layer_names, ranks, micro_batches, rows)
    return Pipeline(
        graph,
        plan,
        example,
        optimizer=lambda p: AdamW(p, lr=1e-4),
        verify="off",
        shard_optimizer=shard_optimizer,
    )


def optimizer_bytes(pipe: Pipeline) -> int:
    """Bytes of the optimizer's state on this rank."""
    tensors = pipe.state_dict()
    return sum(t.nbytes for name, t in tensors.items() if name.startswith("optimizer."))
