"""A model as it is trained: in training mode, and without what only its use for texts needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.capture.training_flags import kept_training_flags

__all__ = ["as_trained"]


@contextmanager
def as_trained(module: nn.Module, model: nn.Module) -> Iterator[None]:
    """Within, ``module``, which holds the user's ``model``, is as in training; then as before."""
    with kept_training_flags(module.modules()), _without_cache(module):
        # Unless the user trains it with parts of it in evaluation mode.
        if not model.training:
            model.train()
        yield


@contextmanager
def _without_cache(module: nn.Module) -> Iterator[None]:
    """Hugging Face models without key-value caches, which would be outputs of the model."""
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
