"""What the tests of compiled stages run: the same training, compiled and not."""

from collections.abc import Sequence
from typing import Any

import torch
from runtime.pipeline_cases import join, normal
from torch import nn

from penstock.capture.chain import Chain
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.trace import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline

WIDTH, ROWS = 6, 12


def with_dropout() -> list[nn.Module]:
    """Layers that draw random numbers and keep running statistics."""
    return [
        nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh()),
        nn.Linear(WIDTH, WIDTH),
    ]


def graph_of(*, traced: bool) -> LayerGraph:
    """Four layers, the loss among them, in float64."""
    torch.manual_seed(0)
    layers, batch = with_dropout(), (normal(3, WIDTH, 1), normal(3, WIDTH, 2))
    model = nn.Sequential(*layers) if traced else Chain(layers)
    return capture_model(model.double(), batch, loss=nn.MSELoss())


def trained(
    plan: Plan,
    *,
    traced: bool,
    compile: bool,
    sizes: Sequence[int] = (ROWS, 7, ROWS),
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """Losses, weights, buffers and the next random numbers after a step on each batch."""
    graph = graph_of(traced=traced)
    batches = [(normal(rows, WIDTH, rows), normal(rows, WIDTH, rows + 1)) for rows in sizes]
    torch.manual_seed(1)
    with Pipeline(
        graph,
        plan,
        batches[0],
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        autocast=autocast,
        compile=compile,
    ) as pipe:
        losses = [pipe.step(batch).loss for batch in batches]
        tensors = {n: t.detach().clone() for n, t in pipe._worker.held.named_tensors().items()}
    return {"losses": torch.tensor(losses).double(), "random": torch.rand(3), **tensors}


def compiled_and_not(
    plans: Sequence[Plan], options: dict[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each plan the results of a compiled run and of another."""
    join()
    return [
        (trained(plan, compile=True, **options), trained(plan, compile=False, **options))
        for plan in plans
    ]


def trained_at_lengths(lengths: Sequence[int], *, compile: bool) -> dict[str, Any]:
    """Losses and weights after a step on a batch of each length; the first is the example's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()
    batches = [tuple(torch.randn(4, n, WIDTH).double() for _ in range(2)) for n in lengths]
    with Pipeline(
        model,
        Plan((Stage(range(3), (0,), (2,)),), 2, 2, "gpipe"),
        batches[0],
        loss=nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        dynamic={0: {1: "length"}, 1: {1: "length"}},
        compile=compile,
    ) as pipe:
        losses = [pipe.step(batch).loss for batch in batches]
        tensors = {n: p.detach().clone() for n, p in pipe.named_parameters()}
    return {"losses": torch.tensor(losses).double(), **tensors}
