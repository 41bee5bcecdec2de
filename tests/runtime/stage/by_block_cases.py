"""What the worker processes of the tests of recompute by block run."""

import copy
from collections.abc import Sequence

import torch
from runtime.pipeline_cases import MICRO_BATCHES, ROWS, join, normal
from runtime.stage.compile_cases import stepped
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.plan.plan import Plan


def with_dropout() -> nn.Module:
    """A chain whose layers draw random numbers and keep running statistics."""
    layers = [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh())
        for _ in range(4)
    ]
    return Chain(layers, loss=nn.MSELoss()).double()


def trained(plan: Plan, steps: int, *, traced: bool) -> dict[str, torch.Tensor]:
    """Losses, weights, buffers and random numbers after some steps under ``plan``."""
    torch.manual_seed(0)
    model = with_dropout()
    batch = (normal(MICRO_BATCHES * ROWS, 6, 1), normal(MICRO_BATCHES * ROWS, 6, 2))
    if traced:
        model, loss = nn.Sequential(*list(model.children())[:4]), nn.MSELoss()
        graph = capture_model(model, batch, loss=loss)
    else:
        graph = capture_model(model, batch)
    return stepped(graph, plan, [batch] * steps)["tensors"]


def trained_under(plans: Sequence[Plan], traced: bool) -> list[dict[str, torch.Tensor]]:
    """`trained` under each plan in turn, in the same processes."""
    join()
    return [trained(copy.deepcopy(plan), 3, traced=traced) for plan in plans]
