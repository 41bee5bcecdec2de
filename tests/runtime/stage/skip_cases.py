"""Models whose layers read far back, and what the processes of their tests run."""

from functools import cache
from typing import Any

import torch
from pipelines_of_any_plan import Pipeline
from runtime.pipeline_cases import join
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.cluster import Cluster
from penstock.measure.roofline import estimate_profile
from penstock.plan.plan import Plan
from penstock.simulate.simulation import simulate_plan

Sent = list[tuple[int, int, int, int, int]]
"""Sender, receiver, stage, micro-batch and bytes of every message of a step, sorted."""


class Block(nn.Module):
    """Computes on a learnt mean of what all layers before it have made."""

    def __init__(self, width: int, before: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(before))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, *before: torch.Tensor) -> torch.Tensor:
        mean = sum(w * x for w, x in zip(self.mix.softmax(0), before, strict=True))
        return self.down(functional.gelu(self.up(mean)))


class AttentionResiduals(nn.Module):
    """Every block reads the results of all earlier ones."""

    def __init__(self, width: int = 8, blocks: int = 6) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(width, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(Block(width, k + 1) for k in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.first(x)]
        for block in self.blocks:
            made.append(block(*made))
        return self.head(sum(made))


class UNet(nn.Module):
    """Half of the layers halve the width, and those that double it again read their results."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.Linear(width >> k, width >> (k + 1)) for k in range(3))
        self.ups = nn.ModuleList(nn.Linear((width >> k) * 3 // 2, width >> k) for k in (2, 1, 0))
        self.head = nn.Linear(2 * width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [x]
        for down in self.downs:
            kept.append(torch.tanh(down(kept[-1])))
        first, x = kept[1], kept.pop()
        for up in self.ups:
            x = torch.tanh(up(torch.cat([x, kept.pop()], -1)))
        return self.head(torch.cat([x, first, first], -1))


MODELS = {"attention residuals": AttentionResiduals, "u-net": UNet}


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    return x, torch.randn(16, 4, generator=generator, dtype=torch.float64)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def graph_of(name: str) -> LayerGraph:
    return capture_model(model_of(name), batch_of(0), loss=functional.mse_loss, granularity="block")


@cache
def trained_alone(name: str, steps: int) -> dict[str, Any]:
    """What `trained` returns, but for messages, in one process without a pipeline."""
    model = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for step in range(steps):
        x, y = batch_of(step)
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    predicted = model(batch_of(0)[0]).detach()
    return {"losses": losses, "weights": dict(model.state_dict()), "predicted": predicted}


def trained(name: str, plan: Plan, steps: int) -> dict[str, Any]:
    """Losses, weights, the messages of the last step, and a prediction, under a plan."""
    graph = graph_of(name)
    with Pipeline(
        graph, batch_of(0), plan=plan, optimizer=lambda p: torch.optim.SGD(p, 0.1)
    ) as pipe:
        losses = [pipe.step(batch_of(step)).loss for step in range(steps)]
        sent = sorted(
            (e.device, e.peer, e.stage, e.micro_batch, e.bytes)
            for e in pipe.timeline().events
            if e.kind == "SEND"
        )
        weights = {n: t.detach().clone() for n, t in pipe.model_state_dict().items()}
        predicted = pipe.predict(batch_of(0))
    return {"losses": losses, "sent": sent, "weights": weights, "predicted": predicted}


def trained_under(cases: list[tuple[str, Plan]], steps: int) -> list[dict[str, Any]]:
    """`trained` under each plan in turn, in the same processes."""
    join()
    return [trained(name, plan, steps) for name, plan in cases]


def simulated(name: str, plan: Plan, cluster: Cluster) -> Sent:
    """The messages that the simulator has."""
    profile = estimate_profile(graph_of(name), batch_of(0), "cpu")
    events = simulate_plan(plan, profile, cluster).timeline.events
    return sorted(
        (e.device, e.peer, e.stage, e.micro_batch, round(e.bytes))
        for e in events
        if e.kind == "SEND"
    )
