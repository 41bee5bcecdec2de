"""A pipeline in one process against the user's own module, run plainly on the whole batch."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety

# Sums over micro-batches in another order than those of the whole batch.
RELATIVE_TOLERANCE = 1e-9
NOISE = 1e-13
STAGES = 3

Gradients = dict[str, torch.Tensor]


class Recorder(torch.optim.SGD):
    """Changes no weight, and keeps the gradients that it was to use."""

    def __init__(self, parameters: Sequence[nn.Parameter], seen: dict[int, torch.Tensor]) -> None:
        super().__init__(parameters, lr=0.0)
        self.seen = seen

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.seen[id(parameter)] = parameter.grad.to_dense().clone()


def plain_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """One step of plain torch by a loss that was just computed; returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def plain(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., torch.Tensor] | None,
    micro_batches: int = 1,
) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients of ``model`` run plainly, the mean over micro-batches; it is as before.

    Buffers stay as the micro-batches leave them until the last is done.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    attributes = {
        part: (dict(vars(part)), dict(part._buffers), dict(part._forward_hooks))
        for part in model.modules()
    }
    losses: list[torch.Tensor] = []
    if not model.training:
        model.train()
    for part in pieces(batch, micro_batches):
        if loss is None:
            found = model(**part) if isinstance(part, dict) else model(*part)
            found = getattr(found, "loss", found)
        else:
            found = loss(model(*part[:-1]), part[-1])
        (found / micro_batches).backward()
        losses.append(found.detach())
    named = model.named_parameters()
    gradients = {n: p.grad.to_dense() for n, p in named if p.grad is not None}
    model.zero_grad()
    for part, (before, held, hooks) in attributes.items():
        vars(part).clear()
        vars(part).update(before)
        part._buffers.update(held)
        # transformers' hooks, of which an attribute says that they are there.
        part._forward_hooks.clear()
        part._forward_hooks.update(hooks)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return torch.stack(losses).mean(), gradients


def pieces(batch: Any, count: int) -> list[Any]:
    """Copies of the rows of a batch, in equal parts."""
    tensors = batch.values() if isinstance(batch, dict) else batch
    cut = [tensor.chunk(count) if tensor.dim() else [tensor] * count for tensor in tensors]
    parts = [tuple(tensor.clone() for tensor in part) for part in zip(*cut, strict=True)]
    if isinstance(batch, dict):
        return [dict(zip(batch, part, strict=True)) for part in parts]
    return parts


def in_pipeline(
    model: nn.Module,
    graph: LayerGraph,
    batch: Any,
    *,
    schedule: str = "1f1b",
    micro_batches: int = 2,
    recompute: bool = False,
) -> tuple[float, Gradients]:
    """Loss and gradients of one step of the pipeline, cut into as many as `STAGES` stages."""
    layers = len(graph.layer_names)
    count = min(STAGES, layers)
    bounds = [round(layers * i / count) for i in range(count + 1)]
    rows = graph.batch_size // micro_batches
    stages = [
        Stage(range(lo, hi), (number,), (rows,), recompute)
        for number, (lo, hi) in enumerate(pairwise(bounds))
    ]
    seen: dict[int, torch.Tensor] = {}
    player = Pipeline(
        graph,
        batch,
        plan=Plan(tuple(stages), micro_batches, rows, schedule),
        optimizer=lambda parameters: Recorder(parameters, seen),
        safety=Safety(transport="in-process"),
        verify="off",
    )
    found = player.step(batch).loss
    return found, {n: seen[id(p)] for n, p in model.named_parameters() if id(p) in seen}


def in_two_stages(
    graph: LayerGraph, batch: Any, *, rows: int, micro_batches: int = 2, **options: Any
) -> Pipeline:
    """A pipeline in this process of the first layer and the others."""
    stages = (
        Stage(range(1), (0,), (rows,)),
        Stage(range(1, len(graph.layer_names)), (1,), (rows,)),
    )
    plan = Plan(stages, micro_batches, rows, "1f1b")
    return Pipeline(graph, batch, plan=plan, safety=Safety(transport="in-process"), **options)


def assert_pipeline_equals_plain(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    tolerance: float = RELATIVE_TOLERANCE,
    granularity: Any = "module",
    micro_batches: int = 2,
    per_micro_batch: bool = False,
    rows: Any = None,
    **options: Any,
) -> LayerGraph:
    """Loss and every gradient of ``model``, captured, against the plain module; gives the graph.

    The module is run on the whole batch; ``per_micro_batch``, as under gradient accumulation.
    ``rows`` is that of `capture_model`.
    """
    expected, theirs = plain(model, batch, loss, micro_batches if per_micro_batch else 1)
    graph = capture_model(model, batch, loss=loss, granularity=granularity, rows=rows)
    found, ours = in_pipeline(model, graph, batch, micro_batches=micro_batches, **options)
    assert abs(found - float(expected)) <= tolerance * abs(float(expected))
    assert set(ours) == set(theirs)  # a parameter that nothing reads has no gradient
    for name, wanted in theirs.items():
        difference = (ours[name] - wanted).norm()
        assert difference <= tolerance * wanted.norm() + NOISE, (name, ours[name], wanted)
    return graph
