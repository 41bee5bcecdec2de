"""Finds the means that a user's loss is made of, with their numbers of terms, while it runs.

    loss = cross_entropy(a, words) + 0.1 * cross_entropy(b, next)        two means
    loss = (errors * mask).sum() / mask.sum()                            one mean
    loss = mse_loss(output, target)                                      none: rows count

Gradient accumulation over micro-batches weights each mean by its own number of terms, and the rest
of the loss by rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.nn import functional

from penstock.capture.loss_weight import call_weight
from penstock.capture.torch_calls import TorchCalls

__all__ = ["LossTerms", "MeasuredLoss", "accumulate"]

DIVISIONS = frozenset(
    [
        torch.div,
        torch.true_divide,
        torch.Tensor.div,
        torch.Tensor.__truediv__,
        torch.Tensor.div_,  # also of ``loss /= count``
    ]
)


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss of ``rows`` samples: its means, their numbers of terms and their factors in it.

    ``alone``: the loss is a single mean and nothing else.
    """

    loss: torch.Tensor
    rows: int
    means: tuple[torch.Tensor, ...]
    counts: tuple[float, ...]
    factors: tuple[float, ...]
    alone: bool

    @property
    def rest(self) -> float:
        """The value of the loss without its means."""
        # Not computed as a difference then, since a mean without terms is NaN.
        if self.alone:
            return 0.0
        parts = zip(self.factors, self.means, strict=True)
        return float(self.loss.detach()) - sum(f * float(mean.detach()) for f, mean in parts)


class LossTerms(TorchCalls):
    """While active, records means whose terms can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._last: torch.Tensor | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func``; if its result is a mean in a loss, record its divisor."""
        result = func(*args, **kwargs)
        count: torch.Tensor | None = None
        if func is functional.cross_entropy or func is functional.nll_loss:
            count = call_weight(*args, **kwargs)
        elif func in DIVISIONS and isinstance(args[0], torch.Tensor):
            count = args[1] if len(args) > 1 else None
        if is_number(result, trained=True) and is_number(count, trained=False):
            self._seen.append((result, count.clone()))
            # Later changes in place (``loss += ...``) are not part of the mean.
            self._last = result.clone()
            return self._last
        return result

    def measured(self, loss: torch.Tensor, rows: int) -> MeasuredLoss:
        """The means that ``loss`` is made of; of nested means only the outer one."""
        counts: list[float] = []
        means: list[torch.Tensor] = []
        factors: list[float] = []
        for mean, count in reversed(self._seen):
            factor = slope(loss, mean)
            if factor is not None and all(slope(outer, mean) is None for outer in means):
                means.append(mean)
                counts.append(float(count))
                factors.append(factor)
        alone = loss is self._last and loss._version == 0
        return MeasuredLoss(loss, rows, tuple(means), tuple(counts), tuple(factors), alone)


def is_number(value: object, *, trained: bool) -> TypeGuard[torch.Tensor]:
    """Whether ``value`` is a scalar tensor that requires a gradient (``trained``), or does not."""
    return isinstance(value, torch.Tensor) and not value.dim() and value.requires_grad == trained


def slope(value: torch.Tensor, by: torch.Tensor) -> float | None:
    """The derivative of ``value`` with respect to ``by``; ``None`` if it does not depend on it."""
    (found,) = torch.autograd.grad(value, by, retain_graph=True, allow_unused=True)
    return None if found is None else float(found)


def accumulate(parts: Sequence[MeasuredLoss], scale: float = 1.0) -> float:
    """Run the backwards of all micro-batches; returns the loss of all of them together.

    Gradients are those of ``scale`` times the loss.
    """
    rows = sum(part.rows for part in parts)
    totals = [sum(counts) for counts in zip(*(part.counts for part in parts), strict=True)]
    value = 0.0
    for part in parts:
        share = part.rows / rows
        roots, seeds = [part.loss], [share]
        value += share * part.rest
        terms = zip(part.means, part.counts, part.factors, totals, strict=True)
        for mean, count, factor, total in terms:
            roots.append(mean)
            seeds.append((count / total - share) * factor)
            value += factor * count / total * float(mean.detach()) if count else 0.0
        starts = [root.new_tensor(scale * seed) for root, seed in zip(roots, seeds, strict=True)]
        if part.loss.requires_grad:
            torch.autograd.backward(roots, starts)
    return value
