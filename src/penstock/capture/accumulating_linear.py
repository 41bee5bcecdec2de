"""Linear layers whose backward adds the weight's gradient directly to ``weight.grad``.

Autograd makes a gradient of the weight's size for each micro-batch and then adds it. One matrix
product that accumulates saves that temporary memory and a pass over three arrays. It helps for
large weights only: a backward in Python costs some microseconds a layer.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from penstock.capture.deferred_weights import adds_directly, can_wait

__all__ = ["LARGE", "accumulating_linear"]

LARGE = 1 << 16
"""Least number of elements of a weight for which this pays."""


def accumulating_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``functional.linear``; the weight's gradient is accumulated directly where possible."""
    if not can_wait(x, weight, bias):
        return functional.linear(x, weight, bias)
    return AccumulatingLinear.apply(x, weight, bias)  # type: ignore[no-any-return]


class AccumulatingLinear(torch.autograd.Function):
    """``x @ weight.T + bias``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None
    ) -> torch.Tensor:
        """The layer's output."""
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of input and bias, and of the weight if it cannot be added directly."""
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        parameter: nn.Parameter = ctx.parameter
        rows = x.reshape(-1, x.shape[-1])
        columns = gradient.reshape(-1, gradient.shape[-1])
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        of_bias = columns.sum(0) if ctx.needs_input_grad[2] else None
        if not adds_directly(parameter):
            return of_input, columns.t() @ rows, of_bias
        parameter.grad.t().addmm_(rows.t(), columns)  # type: ignore[union-attr]
        return of_input, None, of_bias
