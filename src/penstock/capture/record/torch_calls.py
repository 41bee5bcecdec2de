"""A mode through which every call of a torch function goes while it is active."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.capture.record.absent import DRAWN, Absent


class TorchCalls(TorchFunctionMode):
    """Mode that passes every call of a torch function to `call`, which may call it itself."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass a call of ``func`` to `call`; calls of other stages' tensors stay as they are."""
        if Absent in types:
            return func(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the call ``func(*args, **kwargs)``. The mode is off meanwhile."""
        raise NotImplementedError


def backward_seen(roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Run a backward in which active modes see the calls that checkpoints run again."""
    # A call with tensors would itself go through the modes, which are off meanwhile.
    torch.autograd.backward(list(map(get_gradient_edge, roots)), gradients)


BATCH_NORM_OPERATORS = (
    functional.batch_norm,
    torch.batch_norm,
    torch.ops.aten.batch_norm.default,
)


class CountedNorms(TorchCalls):
    """Mode that notes the ``channels`` of each batch normalisation with its own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.channels: list[int] = []

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note batch normalisations in training; all calls are made unchanged."""
        # The function and the operator have the input first and this in the sixth place.
        if func in BATCH_NORM_OPERATORS and (args[5:6] or (kwargs.get("training"),))[0]:
            self.channels.append((args[0] if args else kwargs["input"]).shape[1])
        return func(*args, **kwargs)


RANDOM_NAMES = frozenset(
    [
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"),
        *("feature_alpha_dropout", "native_dropout", "rrelu", "gumbel_softmax", "bernoulli"),
        *("multinomial", "normal", "poisson", "rand_like", "randn_like", "randint_like"),
        *("rrelu_", "dropout_", "alpha_dropout_", *DRAWN),
    ]
)
"""Calls that draw; on absent tensors no generator shows it."""


def draws(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers, as far as its name and arguments show."""
    if name == "scaled_dot_product_attention":
        return bool((args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0)
    if name not in RANDOM_NAMES:
        return False
    if "dropout" in name:
        return bool(kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True)))
    return True
