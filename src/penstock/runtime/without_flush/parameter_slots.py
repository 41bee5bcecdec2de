"""Replaces a module's parameters by other tensors during a forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

__all__ = ["Leaves", "ParameterSlots", "aliases", "new_leaves"]

Leaves: TypeAlias = list[torch.Tensor]
"""Leaf tensors that replace parameters, in their order; gradients go to the parameters."""


class ParameterSlots:
    """The places where a module keeps its trained parameters.

    A parameter with several names counts once. Other parameters are not replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: list[nn.Parameter] = []
        self._slots: list[tuple[Any, Any, int]] = []
        numbers: dict[nn.Parameter, int] = {}
        for part in module.modules():
            # Recurrent modules also keep a list of their weights.
            flat_names = list(getattr(part, "_flat_weights_names", ()))
            for name, parameter in part._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                number = numbers.setdefault(parameter, len(numbers))
                if number == len(self.parameters):
                    self.parameters.append(parameter)
                self._slots.append((part._parameters, name, number))
                if name in flat_names:
                    self._slots.append((part._flat_weights, flat_names.index(name), number))

    @contextmanager
    def holding(self, leaves: Leaves) -> Iterator[None]:
        """Within, the module computes with ``leaves``."""
        self._put(leaves)
        try:
            yield
        finally:
            self._put(self.parameters)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for container, key, number in self._slots:
            container[key] = tensors[number]


def aliases(parameters: Sequence[nn.Parameter]) -> Leaves:
    """Leaves that share the parameters' memory but have their own version counters."""
    return [leaf_of(parameter.data, parameter) for parameter in parameters]


def new_leaves(parameters: Sequence[nn.Parameter]) -> Leaves:
    """Leaves with their own uninitialised memory."""
    return [leaf_of(torch.empty_like(p.data), p) for p in parameters]


def leaf_of(memory: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A leaf in ``memory`` whose gradient is that of the parameter.

    It is a parameter itself, since some layers add to gradients directly for parameters only.
    """
    leaf = nn.Parameter(memory)
    leaf.grad = parameter.grad
    return leaf
