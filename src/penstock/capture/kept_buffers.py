"""Buffers with the same values after a run of the model as before it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["kept_buffers"]


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
