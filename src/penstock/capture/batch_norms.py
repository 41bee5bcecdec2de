"""Counts the batch normalisations of a forward, in modules, functions and captured graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from penstock.capture.torch_calls import TorchCalls

__all__ = ["BATCH_NORM_OPERATORS", "CountedNorms"]

BATCH_NORM_OPERATORS = (
    functional.batch_norm,
    torch.batch_norm,
    torch.ops.aten.batch_norm.default,
)


class CountedNorms(TorchCalls):
    """While active, ``channels`` gets those of each batch normalisation with its own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.channels: list[int] = []

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note batch normalisations in training; all calls are made unchanged."""
        # The function and the operator have the input first and this in the sixth place.
        if func in BATCH_NORM_OPERATORS and (args[5:6] or (kwargs.get("training"),))[0]:
            self.channels.append((args[0] if args else kwargs["input"]).shape[1])
        return func(*args, **kwargs)
