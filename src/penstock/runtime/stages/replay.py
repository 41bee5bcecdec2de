"""Runs a forward a second time with the same result as the first time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["ForwardState", "forward_state", "random_state", "replayed", "restore_random_state"]


@dataclass(frozen=True, slots=True)
class ForwardState:
    """The state of the random number generators of CPU and device before a forward."""

    cpu: torch.Tensor
    device: torch.Tensor | None
    device_index: torch.device


def forward_state(device: torch.device) -> ForwardState:
    """The state that a forward on ``device`` would start from now."""
    return ForwardState(*random_state(device), device)


def random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The generators' states: of the CPU, and of ``device`` if it is a GPU."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), own


def restore_random_state(device: torch.device, cpu: torch.Tensor, own: torch.Tensor | None) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(cpu)
    if own is not None:
        torch.cuda.set_rng_state(own, device)


@contextmanager
def replayed(module: nn.Module, before: ForwardState) -> Iterator[None]:
    """Within, dropout draws the same masks as before, and writes to buffers have no effect.

    The module gets copies of its buffers. Restoring the old values instead would not work: autograd
    may have saved a buffer for the backward, and rejects one that was written to in between.
    """
    after = random_state(before.device_index)
    restore_random_state(before.device_index, before.cpu, before.device)
    originals: list[tuple[nn.Module, str, torch.Tensor]] = []
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            originals.append((part, name, buffer))
            part._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for part, name, buffer in originals:
            part._buffers[name] = buffer
        restore_random_state(before.device_index, *after)
