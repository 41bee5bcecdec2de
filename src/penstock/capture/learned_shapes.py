"""Finds what a module returns for a symbolic number of samples, from runs with two numbers.

A loop over thousands of words is fast on tensors without storage, but slow on tensors with symbolic
sizes, for which every operator does algebra. So the loop runs for ``n`` and for ``n + 3`` samples.
From both, each size and stride of the results becomes a formula ``a * samples + b``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

__all__ = ["Unknown", "learned"]

STEP = 3


class Unknown(Exception):
    """The results cannot be found this way."""


def learned(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of ``function(*args, **kwargs)`` for symbolic tensors, without running on them.

    Raises:
        Unknown: several independent sizes are symbolic, or no such formula fits the results.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    samples = _samples(tensors)
    base = samples.node.hint

    def run(rows: int) -> tuple[list[Any], pytree.TreeSpec]:
        with unset_fake_temporarily():
            concrete = [_concrete(leaf, rows) for leaf in leaves]
            own_args, own_kwargs = pytree.tree_unflatten(concrete, spec)
            return pytree.tree_flatten(function(*own_args, **own_kwargs))

    first, form = run(base)
    second, other_form = run(base + STEP)
    if form != other_form:
        raise Unknown
    made = [_between(*pair, samples, tensors[0]) for pair in zip(first, second, strict=True)]
    return pytree.tree_unflatten(made, form)


def _samples(tensors: Sequence[torch.Tensor]) -> torch.SymInt:
    """The number of samples: the one size that is a symbol by itself."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    symbols = [s for s in sizes if isinstance(s, torch.SymInt) and s.node.expr.is_Symbol]
    if not symbols:
        raise Unknown
    return symbols[0]


def _at(size: Any, rows: int) -> Any:
    """A size for ``rows`` samples; the symbols of all leaves of the batch mean the samples."""
    if not isinstance(size, torch.SymInt):
        return size
    expression, sources = size.node.expr, size.node.shape_env.var_to_sources
    for symbol in expression.free_symbols:
        # Samples are dimension 0 of every tensor of the batch.
        if any(getattr(source, "idx", None) != 0 for source in sources.get(symbol, [None])):
            raise Unknown
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(rows))))


def _concrete(leaf: Any, rows: int) -> Any:
    """An argument without symbols; tensors have no storage."""
    if isinstance(leaf, torch.Tensor):
        shape = [_at(size, rows) for size in leaf.shape]
        stride = [_at(size, rows) for size in leaf.stride()]
        made = torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta")
        return made.requires_grad_(leaf.requires_grad)
    return torch.device("meta") if isinstance(leaf, torch.device) else _at(leaf, rows)


def _between(first: Any, second: Any, samples: torch.SymInt, like: torch.Tensor) -> Any:
    """A symbolic tensor that fits both results, on the device of ``like``."""
    if not isinstance(first, torch.Tensor):
        if first != second:
            raise Unknown
        return first
    shape = [_formula(*pair, samples) for pair in zip(first.shape, second.shape, strict=True)]
    stride = [
        _formula(*pair, samples) for pair in zip(first.stride(), second.stride(), strict=True)
    ]
    made = torch.empty_strided(shape, stride, dtype=first.dtype, device=like.device)
    return made.requires_grad_(first.requires_grad)


def _formula(first: int, second: int, samples: torch.SymInt) -> Any:
    slope, rest = divmod(second - first, STEP)
    if rest:
        raise Unknown
    return slope * samples + (first - slope * samples.node.hint) if slope else first
