"""A small model and its data, slow enough that a fault can hit any part of a step."""

import os
import time
from collections.abc import Iterator

import torch
from torch import nn

WIDTH, HIDDEN = 64, 512
STEP_S = 0.06


def build() -> nn.Module:
    """Layers with some megabytes of weights, so that a checkpoint takes a moment to write."""
    if "PENSTOCK_CHAOS_HOSTS" in os.environ:
        from penstock.runtime.processes import world

        # Every rank counts as a host of its own, so messages go over process groups.
        world.host_identity = lambda: f"the host of process {os.getpid()}"
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Dropout(0.1),
        nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, 8),
    )


def batches(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches that depend on their step alone."""
    step = start_step
    while True:
        time.sleep(STEP_S)
        if os.path.exists(os.environ.get("PENSTOCK_CHAOS_ERROR", "")):
            raise ValueError("no such sample")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        x = torch.randn(batch_size, WIDTH, generator=generator)
        yield x, torch.tanh(x[:, :8] + x[:, 8:16])
        step += 1
