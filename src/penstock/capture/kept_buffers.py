"""Buffers with the same values after a run of the model as before it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["kept_buffers", "kept_buffers_of"]


@contextmanager
def kept_buffers(buffers: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within, ``buffers`` may be written to; then their values are as before."""
    values = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in values:
                buffer.copy_(before)


@contextmanager
def kept_buffers_of(module: nn.Module) -> Iterator[None]:
    """The same for all buffers of ``module``, to which other tensors may be assigned, too."""
    held = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    with kept_buffers(module.buffers()):
        try:
            yield
        finally:
            for buffers, before in held:
                buffers.update(before)
