"""Modules in the training or evaluation mode that they had before."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["kept_training_flags"]


@contextmanager
def kept_training_flags(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, ``modules`` may be put into other modes; then each is in its own again."""
    before = {part: part.training for part in modules}
    try:
        yield
    finally:
        for part, flag in before.items():
            part.training = flag
