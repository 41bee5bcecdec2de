"""Steps that are checked before or after they are taken: iterations in a row, in turns.

On blocks that wait instead of computing, so that ranks need no cores of their own and nothing but
the order of the work decides; and on the GPT-like model, where every rank computes.
"""

import time
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, bounds_of, plan_of
from end_to_end import alternated, cluster_of_ranks
from endless import measured_profile, streams_of
from models import make_model
from torch import nn
from torch.optim import AdamW, Optimizer

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.layer_graph import LayerGraph
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.settings import Update
from penstock.schedule.weight_rule import OptimizerSync
from penstock.simulate.simulation import simulate_plan

__all__ = ["compare_overlapping"]

SCHEDULES = ("1f1b", "zb-h1", "zb-h2")
SYNCS: tuple[OptimizerSync, ...] = ("before", "after")
BATCHES = 6
"""Batches in a row for each measurement; the pipeline runs empty at the end only."""

WAIT_S = 0.01
WIDTH = 8


class Wait(torch.autograd.Function):
    """Waits in the forward, and as long in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The same values, later."""
        time.sleep(WAIT_S)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        """The same gradient, later."""
        time.sleep(WAIT_S)
        return grad_outputs[0]


def wait_for(gradient: torch.Tensor | None) -> None:
    """Wait while a weight's gradient is made; the first half of a backward makes none."""
    if gradient is not None:
        time.sleep(WAIT_S)


class Waiting(nn.Module):
    """A small layer whose forward and both halves of whose backward take equally long."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.register_hook(wait_for)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """A linear layer."""
        found: Any = Wait.apply(self.linear(hidden))
        return found


def compare_overlapping(model_name: str, micro_batches: int, rounds: int) -> dict[str, Any]:
    """Seconds of `BATCHES` batches in a row under each schedule, with and without; as simulated.

    One stage a rank, AdamW, gradients that are not clipped.
    """
    ranks = dist.get_world_size()
    profile = (
        waiting_profile(ranks) if model_name == "waiting" else measured_profile(make_optimizer)
    )
    ways = list(product(SCHEDULES, SYNCS))
    pipes = {way: pipeline_of(model_name, micro_batches, *way) for way in ways}
    torch.manual_seed(0)
    batches = [batch_of(model_name, micro_batches) for _ in range(BATCHES)]
    taken = alternated(streams_of(pipes, batches), rounds)
    predicted: dict[tuple[str, OptimizerSync], float] = {}
    for (schedule, sync), pipe in pipes.items():
        found = simulate_plan(
            pipe.plan, profile, cluster_of_ranks(ranks), iterations=BATCHES, optimizer_sync=sync
        )
        predicted[schedule, sync] = found.iteration_s + (BATCHES - 1) * found.steady_s
        pipe.close()
    return {
        "model": model_name,
        "ranks": ranks,
        "micro_batches": micro_batches,
        "batches": BATCHES,
        "rounds": rounds,
        "rows": [
            {
                "schedule": name,
                "before_s": median(taken[name, "before"]),
                "after_s": median(taken[name, "after"]),
                "predicted_before_s": predicted[name, "before"],
                "predicted_after_s": predicted[name, "after"],
                "ratios": [
                    after / before
                    for before, after in zip(
                        taken[name, "before"], taken[name, "after"], strict=True
                    )
                ],
                "predicted_ratio": predicted[name, "after"] / predicted[name, "before"],
            }
            for name in SCHEDULES
        ],
    }


def make_optimizer(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """AdamW."""
    return AdamW(parameters, lr=1e-4, fused=True)


def batch_of(model_name: str, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of that many micro-batches."""
    if model_name == "waiting":
        return torch.randn(micro_batches, WIDTH), torch.randn(micro_batches, WIDTH)
    return make_model(model_name).batch(micro_batches)


def pipeline_of(
    model_name: str, micro_batches: int, schedule: str, optimizer_sync: OptimizerSync
) -> Pipeline:
    """A pipeline with weights of its own, one stage a rank."""
    ranks, case, example = dist.get_world_size(), CASES["1f1b"], batch_of(model_name, 1)
    graph: LayerGraph
    if model_name == "waiting":
        blocks: list[nn.Module] = [Waiting() for _ in range(ranks)]
        bounds, rows = [range(rank, rank + 1) for rank in range(ranks)], 1
        graph = capture_model(Chain(blocks, loss=nn.MSELoss()), example)
    else:
        model = make_model(model_name)
        blocks, rows = model.blocks, model.rows
        bounds = bounds_of(case, model_name, len(blocks), ranks)
        whole = nn.Sequential(*blocks)
        graph = capture_model(whole, example, loss=model.loss, granularity="block")
    plan = plan_of(case, bounds, graph.layer_names, ranks, micro_batches, rows, schedule)
    update = Update(optimizer_sync=optimizer_sync)
    return Pipeline(graph, plan, example, optimizer=make_optimizer, verify="off", update=update)


def waiting_profile(ranks: int) -> ModelProfile:
    """What the waiting blocks take."""
    wait, nothing = Affine(WAIT_S), Affine()
    block = LayerCost("block", wait, wait, wait, WIDTH * (WIDTH + 1) * 4)
    return ModelProfile(
        "waiting", (*((block,) * ranks), LayerCost("loss", nothing, nothing, nothing))
    )
