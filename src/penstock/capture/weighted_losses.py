"""A loss given as a list of weighted terms: ``loss=[(1.0, words), (0.5, order)]``."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, TypeGuard

import torch
from torch import nn

from penstock.capture.layer_graph import Loss, LossFunction
from penstock.errors import BadInput

__all__ = ["WeightedLosses", "as_function"]


class WeightedLosses(nn.Module):
    """The weighted sum of loss functions of the same output and target.

    Slices of a batch are weighted for each term separately. Terms that are modules keep their
    parameters, under their index in the list.

    >>> one, two = nn.functional.mse_loss, nn.functional.l1_loss
    >>> loss = WeightedLosses([(1.0, one), (0.5, two)])
    >>> float(loss(torch.tensor([1.0]), torch.tensor([3.0])))
    5.0

    Raises:
        BadInput: an entry is not a pair of a number and a function.
    """

    def __init__(self, terms: Sequence[tuple[float, LossFunction]]) -> None:
        super().__init__()
        for place, entry in enumerate(terms):
            if not is_term(entry):
                raise BadInput(
                    f"entry {place} of loss is {entry!r}, but must be a pair of a number and a "
                    f"loss function, as in loss=[(1.0, first), (0.5, second)]"
                )
        if not terms:
            raise BadInput("loss is an empty list; give it pairs of a number and a loss function")
        self._factors = tuple(float(factor) for factor, _ in terms)
        self._functions = tuple(function for _, function in terms)
        for place, function in enumerate(self._functions):
            if isinstance(function, nn.Module):
                self.add_module(str(place), function)

    def __len__(self) -> int:
        """The number of terms."""
        return len(self._functions)

    def terms(self, output: Any, target: Any) -> list[Any]:
        """The result of each function times its factor, in order."""
        found: list[Any] = []
        for factor, function in zip(self._factors, self._functions, strict=True):
            value = function(output, target)
            found.append(value * factor if isinstance(value, torch.Tensor) else value)
        return found

    def forward(self, output: Any, target: Any) -> torch.Tensor:
        """The weighted sum."""
        return reduce(add, self.terms(output, target))


def is_term(entry: Any) -> TypeGuard[tuple[float, LossFunction]]:
    """Whether an entry of the list is a pair of a number and a callable."""
    pair = isinstance(entry, tuple | list) and len(entry) == 2
    return pair and isinstance(entry[0], int | float) and callable(entry[1])


def as_function(loss: Loss | None) -> LossFunction | None:
    """A loss as one function; a list of weighted terms becomes their sum.

    Raises:
        BadInput: it is neither a function nor such a list.
    """
    if isinstance(loss, list | tuple):
        return WeightedLosses(loss)
    if loss is None or callable(loss):
        return loss
    raise BadInput(
        f"loss is a {type(loss).__name__}; give a function loss(output, target), or a list of "
        f"weighted functions, as in loss=[(1.0, first), (0.5, second)]"
    )
