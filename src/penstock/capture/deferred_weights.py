"""Backwards in two halves: weights of linear layers get their gradients later, when asked.

In the first half autograd runs as ever, but a linear layer passes on the gradient of its input only
and keeps what the gradient of its weight is made from; the second half makes it (Zero Bubble, ICLR
2024, section 2.1: the two products of a linear layer's backward do not need one another). Other
parameters (norms, embeddings, convolutions) get their gradients in the first half: they are few, or
cannot be told apart from the rest.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["DeferredGradients", "DeferredWeights"]

LINEAR = (functional.linear, torch.ops.aten.linear.default)
ADDMM = (torch.addmm, torch.ops.aten.addmm.default)

Later: TypeAlias = tuple[nn.Parameter, Callable[[], torch.Tensor]]


class DeferredGradients:
    """What the first half of one backward has left for the second."""

    def __init__(self) -> None:
        self._later: list[Later] = []

    def add(self, parameter: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        """Note how to make a gradient of ``parameter``."""
        assert isinstance(parameter, nn.Parameter)
        self._later.append((parameter, make))

    def __len__(self) -> int:
        """How many gradients are still to be made."""
        return len(self._later)

    def accumulate(self) -> None:
        """Make all gradients and add them to those of the parameters, whose hooks run."""
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for parameter, make in self._later:
            gradient = make()
            before = sums.get(parameter)
            sums[parameter] = gradient if before is None else before.add_(gradient)
        self._later.clear()
        if sums:
            torch.autograd.backward(list(sums), list(sums.values()))


class DeferredWeights(TorchFunctionMode):
    """While active, linear layers leave the gradients of their weights to ``store``.

    Only where weights are trained parameters, and not under autocast, where the types of the two
    products differ: there the first half does everything.
    """

    def __init__(self, store: DeferredGradients) -> None:
        super().__init__()
        self._store = store

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in LINEAR and not kwargs and len(args) in (2, 3):
            x, weight, bias = args if len(args) == 3 else (*args, None)
            if self._can_wait(x, weight, bias):
                return Linear.apply(self._store, x, weight, bias, True)
        if func in ADDMM and not kwargs and len(args) == 3:
            bias, x, weight = args
            if self._can_wait(x, weight, bias) and bias.dim() == 1:
                return Linear.apply(self._store, x, weight, bias, False)
        return func(*args, **(kwargs or {}))

    def _can_wait(self, x: Any, weight: Any, bias: Any) -> bool:
        trained = isinstance(weight, nn.Parameter) and weight.requires_grad
        simple = bias is None or isinstance(bias, nn.Parameter)
        return (
            trained
            and simple
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled(x.device.type)
        )


class Linear(torch.autograd.Function):
    """``x @ weight.T + bias``, or ``x @ weight + bias``; its backward leaves the weight's part."""

    @staticmethod
    def forward(
        ctx: Any,
        store: DeferredGradients,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        transposed: bool,
    ) -> torch.Tensor:
        """The layer's output."""
        ctx.save_for_backward(x)
        ctx.store, ctx.weight, ctx.bias, ctx.transposed = store, weight, bias, transposed
        if transposed:
            return functional.linear(x, weight, bias)
        return x @ weight if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the input; the rest is noted."""
        (x,) = ctx.saved_tensors
        (gradient,) = gradients
        weight, bias = ctx.weight, ctx.bias
        rows, columns = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        if ctx.transposed:
            ctx.store.add(weight, lambda: columns.t() @ rows)
        else:
            ctx.store.add(weight, lambda: rows.t() @ columns)
        if bias is not None and bias.requires_grad:
            ctx.store.add(bias, lambda: columns.sum(0))
        wanted = ctx.needs_input_grad[1]
        factor = weight if ctx.transposed else weight.t()
        # The weight has changed by no step since: a stage's W comes before its optimizer's.
        return None, gradient @ factor if wanted else None, None, None, None
