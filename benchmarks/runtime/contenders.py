"""The two runtimes, each as an iteration to time, and what their actions take by themselves."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, placement_of, plan_of
from models import Chain, Model
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from penstock.capture.capture import capture_model
from penstock.plan.ordering import order_of
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.transport import TransportChoice
from penstock.schedule.action import Action

Batch = tuple[torch.Tensor, ...]
"""Inputs of the model, and the targets behind them."""


class Ours:
    """A pipeline of this project; a step sums gradients and exchanges loss and norm.

    The blocks of ``model`` may be on the meta device: then each rank makes its own only.
    """

    def __init__(
        self,
        case: Case,
        model: Model,
        bounds: list[range],
        count: int,
        transport: TransportChoice = "auto",
    ) -> None:
        batch = model.batch(1)
        whole = nn.Sequential(*model.blocks)
        graph = capture_model(whole, batch, loss=model.loss, granularity="block")
        plan = plan_of(case, bounds, graph.layer_names, dist.get_world_size(), count, model.rows)
        self.orders = [list(order) for order in order_of(plan).orders]
        self.pipe = Pipeline(
            graph, batch, plan=plan, verify="off", safety=Safety(transport=transport)
        )

    def prepare(self) -> None:
        """Nothing: a step begins with gradients of zero by itself."""

    def step(self, batch: Batch) -> None:
        """One iteration."""
        self.pipe.step(batch)

    def recorded_s(self) -> dict[Action, float]:
        """Seconds of each action of the latest iteration on all ranks; all must call this."""
        return {
            Action(event.kind, event.stage, event.micro_batch): event.end_s - event.start_s
            for event in self.pipe.timeline().events
            if event.kind in ("F", "B", "I", "W", "R")
        }

    def close(self) -> None:
        """Leave the other rank."""
        self.pipe.close()


class Rival:
    """The same in torch.distributed.pipelining: one `PipelineStage` for each stage of this rank."""

    def __init__(self, case: Case, model: Model, bounds: list[range], count: int) -> None:
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        placement = placement_of(case, ranks)
        self._modules = {
            stage: Chain(*(model.blocks[block] for block in blocks))
            for stage, blocks in enumerate(bounds)
            if placement[stage] == self._rank
        }
        self._first, self._last = 0 in self._modules, len(bounds) - 1 in self._modules
        device = torch.device("cpu")
        stages = [
            pipelining.PipelineStage(module, stage, len(bounds), device)
            for stage, module in self._modules.items()
        ]
        make = getattr(schedules, case.rival)
        several = issubclass(make, schedules.PipelineScheduleMulti)
        self._schedule = make(stages if several else stages[0], count, loss_fn=model.loss)
        self.orders: list[list[Action]] | None = None
        if several:
            self.orders = [
                list(actions_of(self._schedule.pipeline_order[rank])) for rank in range(ranks)
            ]

    def prepare(self) -> None:
        """Drop the gradients of the last iteration; not timed."""
        for module in self._modules.values():
            module.zero_grad()

    def step(self, batch: Batch) -> None:
        """One iteration, without keeping the outputs of the last stage."""
        given = batch[:-1] if self._first else ()
        named: dict[str, Any] = {"target": batch[-1]} if self._last else {}
        self._schedule.step(*given, **named, return_outputs=False)

    def close(self) -> None:
        """Nothing to leave."""


def actions_of(actions: Sequence[Any]) -> list[Action]:
    """Their compute actions as ours; two that they overlap come one after the other."""
    found: list[Action] = []
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            found += actions_of(action.sub_actions)
        elif action.computation_type.value in ("F", "B", "I", "W"):
            kind = action.computation_type.value
            found.append(Action(kind, action.stage_index, action.microbatch_index))
    return found


def action_seconds(
    model: Model, bounds: list[range], stage: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of F, B, and of the rival's I and W, of one stage on one micro-batch, alone.

    The stage is a plain module in plain autograd, the same for both runtimes: whatever either does
    beside that is its overhead. I and W are the rival's own functions. It leaves all of the first
    stage's backward to W.
    """
    with torch.no_grad():
        inputs, targets = model.batch(1)
        for block in range(bounds[stage].start):
            inputs = model.blocks[block](inputs)
    module = nn.Sequential(*(model.blocks[block] for block in bounds[stage]))
    last = stage == len(bounds) - 1

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        entering = inputs.detach().requires_grad_(stage > 0)
        output = module(entering)
        return entering, model.loss(output, targets) if last else output

    gradient = None if last else torch.ones_like(forward()[1])
    found: dict[str, list[float]] = {kind: [] for kind in "FBIW"}
    for number in range(repeats + 1):
        start = perf_counter()
        _, output = forward()
        between = perf_counter()
        output.backward(gradient)
        end = perf_counter()
        parts = [between - start, end - between, 0.0, end - between]
        if stage > 0:
            entering, output = forward()
            given = None if gradient is None else [gradient]
            start = perf_counter()
            weights = module.parameters()
            _, groups = stage_backward_input([output], given, [entering], weights)
            between = perf_counter()
            stage_backward_weight(module.parameters(), groups)
            parts[2:] = [between - start, perf_counter() - between]
        if number:
            for kind, seconds in zip("FBIW", parts, strict=True):
                found[kind].append(seconds)
    return found
