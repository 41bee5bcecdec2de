"""What the tests of compiled stages run: the same training, compiled and not."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import join, normal
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.plan.plan import Plan, Stage

WIDTH, ROWS = 6, 12


class Perceptron(nn.Module):
    """A unit with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(functional.gelu(self.up(x))))


class Block(nn.Module):
    """A norm with running statistics and a unit, with a sum around both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), Perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


def sequences() -> nn.Module:
    """Layers that draw random numbers and keep running statistics."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh()),
        nn.Linear(WIDTH, WIDTH),
    )


def blocks() -> nn.Module:
    """Blocks of equal classes, one after the other."""
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {"sequences": sequences, "blocks": blocks}
"""Both have four layers, and the loss."""


def graph_of(model: str, *, compile: bool) -> LayerGraph:
    """The model in float64, with its loss."""
    torch.manual_seed(0)
    made, batch = MODELS[model](), (normal(3, WIDTH, 1), normal(3, WIDTH, 2))
    return capture_model(made.double(), batch, loss=nn.MSELoss(), compile=compile)


def trained(
    plan: Plan,
    *,
    model: str,
    compile: bool,
    sizes: Sequence[int] = (ROWS, 7, ROWS),
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """Losses, weights, buffers and the next random numbers after a step on each batch.

    Also the number of compiled graphs, which are compiled anew.
    """
    if compile:
        torch._dynamo.reset()
    graph = graph_of(model, compile=compile)
    batches = [(normal(rows, WIDTH, rows), normal(rows, WIDTH, rows + 1)) for rows in sizes]
    return stepped(graph, plan, batches, autocast, evaluates=True)


def stepped(
    graph: LayerGraph,
    plan: Plan,
    batches: Sequence[Any],
    autocast: torch.dtype | None = None,
    *,
    evaluates: bool = False,
) -> dict[str, Any]:
    """What `trained` returns; that ``evaluates`` the last batch after the steps."""
    torch.manual_seed(1)
    with Pipeline(
        graph,
        batches[0],
        plan=plan,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        autocast=autocast,
    ) as pipe:
        losses = [pipe.step(batch).loss for batch in batches]
        if evaluates:
            losses.append(pipe.evaluate(batches[-1]).loss)
        tensors = {n: t.detach().clone() for n, t in pipe._engine.held.named_tensors().items()}
        graphs = pipe.compiled_graphs
    found = {"losses": torch.tensor(losses).double(), "random": torch.rand(3), **tensors}
    return {"graphs": graphs, "tensors": found}


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
    """`trained` on a batch of each length; the first is the example's."""
    torch.manual_seed(0)
    model = nn.Sequential(Perceptron(), nn.Linear(WIDTH, WIDTH)).double()
    batches = [tuple(torch.randn(4, n, WIDTH).double() for _ in range(2)) for n in lengths]
    dynamic: Any = {0: {1: "length"}, 1: {1: "length"}}
    graph = capture_model(model, batches[0], loss=nn.MSELoss(), dynamic=dynamic, compile=compile)
    plan = Plan((Stage(range(len(graph.layer_names)), (0,), (2,)),), 2, 2, "gpipe")
    return stepped(graph, plan, batches)
