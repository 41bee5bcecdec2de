"""Training with the optimizer's state in host memory, on stand-in GPUs, beside plain training."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stand_in_gpu
import torch
import torch.distributed as dist
from refused import refusal_of
from torch import nn
from torch.nn import functional
from torch.optim import Adagrad, AdamW, Optimizer, RMSprop

from penstock.capture.capture import capture_model
from penstock.device import allocated_bytes
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety, StateOn, Update
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.update import host_state

STEPS, SAVED = 5, 2
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "Adagrad": lambda p: Adagrad(p, lr=0.01),
    "RMSprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9),
}
"""Adagrad makes its state before the first step."""


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU()))
    return nn.Sequential(*layers, nn.Linear(32, 8)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, n, generator=drawn, dtype=torch.float64) for n in (32, 8))
    return x, y


def plan_for(layers: int, kind: str) -> Plan:
    """Two ranks: a stage each, or replicas of one stage that may divide something."""
    if kind == "stages":
        stages = Stage(range(2), (0,), (4,)), Stage(range(2, layers), (1,), (4,))
        return Plan(stages, 2, 4, "1f1b")
    sharding = "" if kind == "replicas" else kind
    return Plan((Stage(range(layers), (0, 1), (2, 2), sharding=sharding),), 2, 4, "1f1b")


def plain_losses(optimizer: str) -> list[float]:
    """Losses of the plain loop in this process, with clipping."""
    net = model()
    stepper, found = OPTIMIZERS[optimizer](net.parameters()), list[float]()
    for step in range(STEPS):
        x, y = batch(step)
        stepper.zero_grad()
        loss = functional.mse_loss(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        stepper.step()
        found.append(loss.item())
    return found


def on_gpus() -> torch.device:
    stand_in_gpu.install(int(os.environ["WORLD_SIZE"]), first_use_s=60.0)
    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    return device


def pipeline(kind: str, optimizer: str, state_on: StateOn, device: torch.device) -> Pipeline:
    graph = capture_model(model(), batch(0), loss=functional.mse_loss)
    return Pipeline(
        graph,
        batch(0),
        plan=plan_for(len(graph.layer_names), kind),
        optimizer=OPTIMIZERS[optimizer],
        clip_norm=0.3,
        device=device,
        timeout_s=60,
        update=Update(state_on=state_on),
        safety=Safety(transport="process-groups"),
    )


def trained(
    kind: str, optimizer: str, state_on: StateOn, device: torch.device, folder: Path
) -> dict[str, Any]:
    """Losses of a run that is saved, led astray and resumed, and what the GPU and host hold."""
    with pipeline(kind, optimizer, state_on, device) as pipe:
        losses = [pipe.step(batch(step)).loss for step in range(SAVED)]
        pipe.save(folder)
        pipe.step(batch(50))
        pipe.load(folder)
        losses += [pipe.step(batch(step)).loss for step in range(SAVED, STEPS)]
        state = pipe._training.tensors().values()
        gc.collect()
        found = {
            "losses": losses,
            "on": {value.device.type for value in state if value.dim()},
            "verified": str(pipe.verified),
            "bytes": allocated_bytes(device),
        }
        pipe.close(gather=True)
    return found


def all_trained(cases: tuple[tuple[str, str, StateOn], ...], folder: Path) -> list[dict[str, Any]]:
    device = on_gpus()
    return [trained(*case, device, folder / "-".join([*case])) for case in cases]


def on_cpus(folder: Path) -> dict[str, Any]:
    return trained("stages", "AdamW", "host", torch.device("cpu"), folder)


def without_room() -> str:
    """What is said on a host whose memory is too small."""
    device = on_gpus()
    free = host_state.free_host_memory()
    host_state.free_host_memory = lambda: type(free)(10_000.0, "free memory of the host")
    return refusal_of(pipeline, "stages", "AdamW", "host", device)
