"""A job that waits most of the time: its data come every half second, and it computes little."""

import os
import time
from collections.abc import Iterator

import torch
from torch import nn

WIDTH = 32
STEP_S = float(os.environ.get("PENSTOCK_SOAK_STEP_S", "0.5"))


def build() -> nn.Module:
    """Six small layers."""
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


def batches(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches that depend on their step alone, so a repeated or missing one changes the loss."""
    step = start_step
    while True:
        time.sleep(STEP_S)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        x = torch.randn(batch_size, WIDTH, generator=generator)
        yield x, torch.randn(batch_size, 8, generator=generator)
        step += 1
