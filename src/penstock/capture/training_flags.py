"""Restores the training or evaluation mode of modules."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["as_trained", "kept_buffers", "kept_training_flags"]


@contextmanager
def kept_training_flags(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, the modes of ``modules`` may change; they are restored afterwards."""
    before = {part: part.training for part in modules}
    try:
        yield
    finally:
        for part, flag in before.items():
            part.training = flag


@contextmanager
def as_trained(module: nn.Module, model: nn.Module) -> Iterator[None]:
    """Put ``module``, which holds the user's ``model``, in training mode; restore it afterwards."""
    with kept_training_flags(module.modules()), _without_cache(module):
        # A model that is partly in evaluation mode by the user's choice stays so.
        if not model.training:
            model.train()
        yield


@contextmanager
def _without_cache(module: nn.Module) -> Iterator[None]:
    """Disable the key-value caches of Hugging Face models, which would be outputs of the model."""
    found: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    configs = {id(config): config for config in found if hasattr(config, "use_cache")}
    before = {key: config.use_cache for key, config in configs.items()}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for key, config in configs.items():
            config.use_cache = before[key]


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
