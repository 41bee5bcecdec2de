"""Parts 2.5 and 2.6: optimizer state in host memory, and adapters on a quantised base."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from overhead import seconds_of
from rows import Row, Setting, told, under
from runtime.quantised_cases import KINDS, adapted, make_optimizer, plain_losses, plan_for, tokens
from torch import nn
from torch.optim import AdamW

from penstock.capture.capture import capture_model
from penstock.device import allocated_bytes
from penstock.plan.plan import Plan, Stage, StateOn
from penstock.plan_here import measured_steps
from penstock.runtime.options import Safety, Update
from penstock.runtime.pipeline import Pipeline

STEPS = 5
ADAM_STATE, FLOAT32_BAR, QUANTISED_BAR = 2.0, 1e-5, 1e-3
"""A GPU rounds otherwise than a CPU, and its int8 and 4-bit kernels otherwise than the CPU's."""


def layers(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))


def state_in_host_memory(setting: Setting) -> Iterator[Row]:
    """Losses and bytes with the state in either place, and the seconds of a step as measured."""
    width = 64 if setting.small else 4096
    batch = torch.randn(8, width), torch.randn(8, width)

    def run(place: StateOn) -> tuple[list[float], int, float]:
        before = allocated_bytes(setting.device)
        with Pipeline(
            layers(width),
            batch,
            plan=Plan((Stage(range(9), (0,), (4,)),), 2, 4, "1f1b"),
            loss=nn.MSELoss(),
            optimizer=lambda p: AdamW(p, lr=1e-4),
            clip_norm=1.0,
            device=setting.device,
            update=Update(state_on=place),
        ) as pipe:
            losses = [pipe.step(batch).loss for _ in range(STEPS)]
            held = allocated_bytes(setting.device) - before
            return losses, held, seconds_of(lambda: pipe.step(batch))

    other, more, other_s = run("device")
    gc.collect()
    own, held, own_s = run("host")
    gc.collect()
    worst = max(abs(a - b) / abs(b) for a, b in zip(own, other, strict=True))
    yield under("2.5", "losses with the state in either place", worst, FLOAT32_BAR)
    size = sum(p.nbytes for p in layers(width).parameters())
    share = abs((more - held) / (ADAM_STATE * size) - 1)
    yield under("2.5", "bytes less, against twice the parameters'", share, 0.05)
    costs = f"{other_s * 1e3:.3g} ms on the device, {own_s * 1e3:.3g} ms in host memory"
    yield told("2.5", "a step", costs, device_s=other_s, host_s=own_s)
    graph = capture_model(layers(width), batch, loss=nn.MSELoss())
    make: Callable[[Any], AdamW] = lambda p: AdamW(p, lr=1e-4)  # noqa: E731
    measured = measured_steps(graph, make, setting.device)
    error = abs((measured[1] - measured[0]) * size / (own_s - other_s) - 1)
    row = under("2.5", "what it costs, as profiled, against measured", error, 0.2)
    yield setting.by_device(row)


def quantised_bases(setting: Setting) -> Iterator[Row]:
    """Losses of each kind of base in a pipeline on the GPU, against one process on the CPU."""
    if setting.stand_in:
        yield told("2.6", "quantised bases", "the stand-in carries no tensors of such classes")
        return
    for kind in KINDS:
        graph = capture_model(adapted(kind), tokens(0), granularity="block")
        with Pipeline(
            graph,
            tokens(0),
            plan=plan_for(graph, replicas=False),
            optimizer=make_optimizer,
            device=setting.device,
            safety=Safety(transport="in-process"),
        ) as pipe:
            losses = [pipe.step(tokens(step)).loss for step in range(STEPS)]
            verified = str(pipe.verified)
        plain = plain_losses(kind)
        worst = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        yield under("2.6", f"{kind}: losses", worst, QUANTISED_BAR, verified=verified)
