"""Split backwards in two halves: linear layers get the gradients of their weights in the second.

In the first half autograd runs as usual, but a linear layer computes only the gradient of its input
and keeps what the gradient of its weight is computed from. The second half computes that (Zero
Bubble, ICLR 2024, section 2.1: the two products of a linear layer's backward are independent).
Other parameters (norms, embeddings, convolutions) get their gradients in the first half, because
they are small or cannot be separated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from penstock.torch_internals import checkpoint_here, gradient_hooks, run_engine


@dataclass(slots=True)
class Product:
    """A linear layer; its weight's gradient is the product of ``x`` and the output's gradient.

    ``output`` is the autograd edge at which the latter is found. ``transposed``: the layer
    multiplies by the transposed weight.
    """

    x: torch.Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool
    output: GradientEdge | None
    gradient: torch.Tensor | None = None


class DeferredGradients:
    """Work that the first half of one backward leaves to the second half.

    ``products`` are layers that ran on detached weights (`deferred_linear`), so autograd does not
    know these weights.
    """

    def __init__(self) -> None:
        self.products: list[Product] = []

    def first_half(
        self,
        roots: Sequence[GradientEdge | torch.Tensor],
        seeds: Sequence[torch.Tensor],
        entered: Sequence[torch.Tensor],
        others: Sequence[nn.Parameter],
    ) -> None:
        """Compute gradients of inputs, of the layers' outputs and of other parameters."""
        wanted = [*entered, *others, *(product.output for product in self.products)]
        found = run_backward(roots, seeds, wanted)
        leaves = len(entered) + len(others)
        for tensor, gradient in zip(entered, found, strict=False):
            tensor.grad = gradient
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for parameter, gradient in zip(others, found[len(entered) : leaves], strict=True):
            if gradient is not None:
                add_gradient(parameter, gradient, sums)
        accumulate_with_hooks(sums)
        for product, gradient in zip(self.products, found[leaves:], strict=True):
            product.gradient, product.output = gradient, None

    def accumulate(self) -> None:
        """Compute all gradients, add them to those of the parameters, and run their hooks."""
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for product in self.products:
            if product.gradient is not None:
                add_product(product, product.gradient, sums)
        self.products.clear()
        accumulate_with_hooks(sums)


def run_backward(
    roots: Sequence[GradientEdge | torch.Tensor],
    seeds: Sequence[torch.Tensor],
    places: Sequence[Any] | None = None,
) -> Sequence[torch.Tensor | None]:
    """The gradients at ``places``; without, those of leaves are accumulated. Frees the graph.

    `torch.autograd.backward` and `grad` inspect every argument in Python before they call the
    engine. That takes tens of microseconds, as long as the backward of a small layer. Here the
    arguments are already in the engine's form. If a version of torch lacks that interface, the
    public functions are called.
    """
    adds, at = places is None, tuple(places or ())
    if run_engine is not None:
        given = tuple(roots), tuple(seeds), False, False, at
        return run_engine(*given, allow_unreachable=True, accumulate_grad=adds)
    if adds:
        backward: Any = torch.autograd.backward
        backward(list(roots), list(seeds))
        return ()
    grad: Any = torch.autograd.grad
    return grad(list(roots), at, list(seeds), allow_unused=True)


def accumulate_with_hooks(sums: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Add to the gradients of parameters, and run their hooks."""
    if sums:
        torch.autograd.backward(list(sums), list(sums.values()))


def add_gradient(
    parameter: nn.Parameter, gradient: torch.Tensor, sums: dict[nn.Parameter, torch.Tensor]
) -> None:
    """Add to a parameter's gradient, or to its sum in ``sums`` if hooks must run."""
    if parameter.grad is not None and adds_directly(parameter):
        parameter.grad.add_(gradient)
    else:
        sums[parameter] = sums[parameter].add_(gradient) if parameter in sums else gradient


def add_product(
    product: Product, gradient: torch.Tensor, sums: dict[nn.Parameter, torch.Tensor]
) -> None:
    """Multiply and add directly to the gradients, or to ``sums`` if hooks must run."""
    weight, bias = product.weight, product.bias
    rows, columns = as_matrix(product.x), as_matrix(gradient)
    left, right = (columns, rows) if product.transposed else (rows, columns)
    of_weight = added_product(weight, left, right)
    if of_weight is not None:
        add_gradient(weight, of_weight, sums)
    if bias is not None and bias.requires_grad:
        add_gradient(bias, columns.sum(0), sums)


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all dimensions but the last as one."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def added_product(
    weight: nn.Parameter, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor | None:
    """Add ``left.t() @ right`` to the weight's gradient, or return it if hooks must run."""
    if not adds_directly(weight):
        return left.t() @ right
    # On CPUs the transposed product is the faster one.
    weight.grad.t().addmm_(right.t(), left)  # type: ignore[union-attr]
    return None


def adds_directly(parameter: nn.Parameter) -> bool:
    """Return whether a product may be added to the parameter's gradient without autograd."""
    of_its_type = parameter.grad is not None and parameter.grad.dtype == parameter.dtype
    return of_its_type and not any(gradient_hooks(parameter))


def deferred_linear(
    store: DeferredGradients,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = True,
) -> torch.Tensor:
    """A linear layer with only its input visible to autograd; ``store`` gets the rest.

    It is ``functional.linear``, or ``torch.addmm`` if the weight is not ``transposed``. An output
    of inputs without gradient becomes a leaf, which autograd keeps until the first half.
    """
    waits = can_wait(x, weight, bias)
    own, added = weight, bias
    if waits:
        own, added = weight.detach(), None if bias is None else bias.detach()
    if transposed:
        output = functional.linear(x, own, added)
    else:
        output = torch.addmm(cast(torch.Tensor, added), x, own)
    if not waits:
        return output
    if output.grad_fn is None:
        edge = get_gradient_edge(output.requires_grad_())
    else:
        edge = GradientEdge(output.grad_fn, output.output_nr)
    layer = cast(nn.Parameter, weight), cast("nn.Parameter | None", bias)
    store.products.append(Product(x.detach(), *layer, transposed, edge))
    return output


def can_wait(x: torch.Tensor, weight: Any, bias: Any) -> bool:
    """Return whether the second half can compute the gradients: of parameters, without autocast.

    In a checkpoint the backward runs the layer again, by itself.
    """
    return (
        isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and (bias is None or isinstance(bias, nn.Parameter))
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and checkpoint_here() is None
    )


LARGE = 1 << 16
"""Least number of elements of a weight for which this pays."""


def accumulating_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``functional.linear``; the weight's gradient is accumulated directly where possible.

    One product that accumulates saves memory of the weight's size and a pass over three arrays.
    """
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
        columns = as_matrix(gradient)
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        of_bias = columns.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, added_product(ctx.parameter, columns, as_matrix(x)), of_bias
