"""Restores the training or evaluation mode of modules."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["kept_training_flags"]


@contextmanager
def kept_training_flags(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, the modes of ``modules`` may change; they are restored afterwards."""
    before = {part: part.training for part in modules}
    try:
        yield
    finally:
        for part, flag in before.items():
            part.training = flag
