"""Runs autograd's backward without the overhead of its Python functions.

`torch.autograd.backward` and `grad` inspect every argument in Python before they call the engine.
That takes tens of microseconds, as long as the backward of a small layer. Here the arguments are
already in the engine's form. If a version of torch lacks that interface, the public functions are
called.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Places", "edge_of", "gradients_at", "run_backward"]

Places: TypeAlias = Sequence[torch.Tensor | GradientEdge]

engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
direct: Callable[..., Any] | None = getattr(engine, "run_backward", None)


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """The place in the graph where the gradient of ``tensor`` enters; it keeps no values alive."""
    if tensor.grad_fn is None:
        return get_gradient_edge(tensor)
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


def run_backward(roots: Sequence[GradientEdge], seeds: Sequence[torch.Tensor]) -> None:
    """Accumulate the gradients of all leaves; frees the graph."""
    if direct is None:
        torch.autograd.backward(list(roots), list(seeds))
    else:
        direct(
            tuple(roots),
            tuple(seeds),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def gradients_at(
    roots: Sequence[GradientEdge], seeds: Sequence[torch.Tensor], places: Places
) -> Sequence[torch.Tensor | None]:
    """The gradients at ``places``, without accumulating them; frees the graph."""
    if direct is None:
        grad: Any = torch.autograd.grad
        return grad(list(roots), list(places), list(seeds), allow_unused=True)
    return direct(
        tuple(roots),
        tuple(seeds),
        False,
        False,
        tuple(places),
        allow_unreachable=True,
        accumulate_grad=False,
    )
