"""Cause of a step's difference from the user's module, as far as the module's own runs show it."""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.torch_internals import tensors_in


class Call(NamedTuple):
    """A call of a module, with copies of the tensors that it was given and has returned."""

    module: str
    given: list[torch.Tensor]
    made: list[torch.Tensor]


def cause_of(
    module: nn.Module, leaves: Sequence[torch.Tensor], micro_batches: Sequence[range], limit: float
) -> str:
    """The cause in words, and its remedy; empty if none is found.

    That is the first of its modules that is given the same and makes other numbers: when it runs
    again, or on the samples of a micro-batch alone. ``limit`` is the largest relative difference.
    """
    whole = calls_of(module, leaves)
    found = first_change(whole, calls_of(module, leaves), limit, is_part=False)
    if found:
        return (
            f"{found} gives other numbers when it runs again on the same batch: it draws from a "
            f"generator of its own, or keeps a state; draw from torch's default generator, or pass "
            f"the numbers in the batch"
        )
    rows = micro_batches[-1]
    part = calls_of(module, [leaf[rows.start : rows.stop] for leaf in leaves])
    found = first_change(whole, part, limit, is_part=True)
    return found and (
        f"{found} gives other results for {len(rows)} samples alone than for the same among "
        f"{len(leaves[0])}, so samples (the first dimension of the batch) act on one another in "
        f"it; if it takes time first, give it batch_first=True or turn its input, else train with "
        f"one micro-batch in a step"
    )


def calls_of(module: nn.Module, leaves: Sequence[torch.Tensor]) -> list[Call]:
    """The calls of all modules within a module, in the order in which they return."""
    found: list[Call] = []
    names = {part: name.removeprefix("model.") for name, part in module.named_modules()}

    def copies(value: Any) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in tensors_in(value)]

    def note(part: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        name = f"'{names[part]}' ({type(part).__name__})"
        found.append(Call(name, copies((args, kwargs)), copies(result)))

    handles = [part.register_forward_hook(note, with_kwargs=True) for part in names]
    try:
        module(*leaves)
    finally:
        for handle in handles:
            handle.remove()
    return found


def first_change(
    whole: Sequence[Call], other: Sequence[Call], limit: float, *, is_part: bool
) -> str:
    """The first module that is given the same, and makes something else; ``other`` may be a part.

    A result that has no samples may be another one for a part of them.
    """
    for before, after in zip(whole, other, strict=False):
        if before.module != after.module:
            break
        if any(
            relative_difference(*pair) > limit
            for pair in zip(before.given, after.given, strict=False)
        ):
            continue
        for a, b in zip(before.made, after.made, strict=False):
            if limit < relative_difference(a, b) < inf and (a.shape != b.shape) == is_part:
                return before.module
    return ""


def relative_difference(whole: torch.Tensor, part: torch.Tensor) -> float:
    """The relative difference of the last rows of a tensor from ``part``.

    It is infinite where the dimension of the rows is ambiguous.
    """
    dims = [d for d, (a, b) in enumerate(zip(whole.shape, part.shape, strict=False)) if a > b]
    if len(dims) == 1:
        rows = part.shape[dims[0]]
        whole = whole.narrow(dims[0], whole.shape[dims[0]] - rows, rows)
    if whole.shape != part.shape:
        return inf
    if not part.numel():
        return 0.0
    whole, part = whole.double(), part.double()
    return float((whole - part).abs().max() / whole.abs().max().clamp(min=1e-30))
