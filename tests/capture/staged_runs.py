"""Runs recorded stages in this process: together, each on a rank's model, or interleaved.

A rank is a copy of the user's model, with the parameters of other ranks freed.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.forward.partial_forward import RunContext
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.absent import Absent

WAYS = ("together", "ranks", "interleaved")


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest wanted number."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def bounds_of(layers: int, stages: int) -> list[int]:
    """Even cuts."""
    cuts = {max(1, layers * k // stages) for k in range(1, stages)} - {layers}
    return [0, *sorted(cuts), layers]


class StagedRun:
    """The stages of a model, run micro-batch by micro-batch; gradients are accumulated."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        way: str = "together",
        stages: int = 3,
        cuts: Sequence[int] | None = None,
        loss: Any = None,
        capture: Callable[..., LayerGraph] = capture_model,
        **options: Any,
    ) -> None:
        first = capture(model, batch, loss=loss, **options)
        layers = len(first.layer_names)
        bounds = [0, *cuts, layers] if cuts is not None else bounds_of(layers, stages)
        if way == "interleaved" and cuts is None:
            bounds = bounds_of(layers, 4)
        places = self._places = list(range(len(bounds) - 1))
        self._bounds = bounds
        ranks = {"together": 1, "ranks": len(places), "interleaved": 2}[way]
        self.graphs, self.models = [first], [model]
        if ranks > 1:
            self.models = [copy.deepcopy(model) for _ in range(ranks)]
            self.graphs = [capture(own, batch, loss=loss, **options) for own in self.models]
        self._make_stages()
        self.steps = 0

    def _make_stages(self) -> None:
        ranks, bounds = len(self.graphs), self._bounds
        self.programs = [
            self.graphs[k % ranks].stage(range(bounds[k], bounds[k + 1])) for k in self._places
        ]
        if ranks > 1:
            for rank, graph in enumerate(self.graphs):
                graph.hold_only([p for k, p in enumerate(self.programs) if k % ranks == rank])

    @property
    def last(self) -> LayerGraph:
        """The graph of the last stage."""
        return self.graphs[(len(self.programs) - 1) % len(self.graphs)]

    def step(self, batch: Any, rows: Sequence[int], *, recompute: bool = False) -> float:
        """One step of micro-batches with these numbers of samples; returns its loss."""
        if any([graph.cut.follow_flags() for graph in self.graphs]):
            self._make_stages()
        leaves = self.last.batch_leaves(batch)
        self.steps += 1
        done: list[tuple[torch.Tensor, torch.Tensor, Any, int]] = []
        start = 0
        for number, size in enumerate(rows):
            own = [leaf[start : start + size] for leaf in leaves]
            start += size
            done.append((*self._forward(own, number, recompute=recompute), number))
        total = sum(float(weight) for _, weight, _, _ in done)
        value = 0.0
        for loss, weight, kept, number in done:
            value += float(loss.detach()) * float(weight) / total if weight else 0.0
            self._backward(own, float(weight) / total, kept, number, recompute=recompute)
        return value

    def _run(self, program: Any, leaves: Any, given: Any, context: RunContext) -> Any:
        program.module.__dict__["context"] = context
        return program.module.run([leaves[i] for i in program.batch_inputs], given)

    def _forward(self, leaves: Any, number: int, *, recompute: bool) -> Any:
        pool: dict[str, torch.Tensor] = {}
        kept: list[Any] = []
        for program in self.programs:
            given = [
                pool[spec.name].detach().requires_grad_(spec.requires_grad)
                for spec in program.received
            ]
            context = RunContext(self.steps, number, keep=recompute)
            with torch.set_grad_enabled(not recompute):
                made = self._run(program, leaves, given, context)
            pool |= {spec.name: t for spec, t in zip(program.sent, made, strict=False)}
            kept.append((program, leaves, given, made))
        loss, weight = made[len(program.sent) :][:2]
        return loss, weight, kept

    def _backward(
        self, leaves: Any, share: float, kept: Any, number: int, *, recompute: bool
    ) -> None:
        gradients: dict[str, torch.Tensor] = {}
        for program, own, given, made in reversed(kept):
            if recompute:
                context = RunContext(self.steps, number, replay=True)
                made = self._run(program, own, given, context)
            roots = [
                (tensor, gradients[spec.name])
                for spec, tensor in zip(program.sent, made, strict=False)
                if spec.name in gradients and tensor.requires_grad
            ]
            if program.is_last and made[len(program.sent)].requires_grad:
                loss = made[len(program.sent)]
                roots.append((loss, torch.full_like(loss, share)))
            if roots:
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
            for spec, tensor in zip(program.received, given, strict=True):
                if tensor.grad is not None:
                    before = gradients.get(spec.name)
                    gradients[spec.name] = tensor.grad if before is None else before + tensor.grad

    def gradient(self, name: str) -> torch.Tensor | None:
        """The gradient of a parameter, summed over the ranks that hold it."""
        held = [model.get_parameter(name) for model in self.models]
        found = [p.grad for p in held if type(p) is not Absent and p.grad is not None]
        return sum(found[1:], found[0]) if found else None

    def zero(self) -> None:
        """Forget all gradients."""
        for model in self.models:
            for parameter in model.parameters():
                parameter.grad = None
