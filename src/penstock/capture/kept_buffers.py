"""Restores buffers after a run of the model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["kept_buffers", "kept_buffers_of"]


@contextmanager
def kept_buffers(buffers: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the values of ``buffers`` on leaving."""
    values = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in values:
                buffer.copy_(before)


@contextmanager
def kept_buffers_of(module: nn.Module) -> Iterator[None]:
    """Restore all buffers of ``module`` on leaving, even if other tensors were assigned."""
    held = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    with kept_buffers(module.buffers()):
        try:
            yield
        finally:
            for buffers, before in held:
                buffers.update(before)
