"""Puts a model into the state in which it is trained: training mode, without key-value caches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.capture.training_flags import kept_training_flags

__all__ = ["as_trained"]


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
