"""Finds how many terms a mean loss averages, while the loss function runs.

Micro-batches with unequal numbers of valid targets must not be averaged equally. For losses that
end in cross entropy (or negative log likelihood) the divisor is known exactly: the valid targets,
or the sum of their class weights (the formulas of ``torch.nn.CrossEntropyLoss``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.nn import functional

from penstock.capture.torch_calls import TorchCalls
from penstock.errors import BadInput

__all__ = ["LossWatch", "call_weight", "target_weight"]


def target_weight(
    target: torch.Tensor,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The divisor of the mean in cross entropy, as a 0-dim tensor.

    Valid targets; with class weights, the sum of the weights of the valid targets; for targets
    that are class probabilities, the number of distributions.
    """
    if target.is_floating_point():
        classes = target.shape[1] if target.dim() > 1 else target.shape[0]
        return target.new_full((), target.numel() // classes, dtype=torch.float32)
    valid = target.ne(ignore_index)
    if class_weight is None:
        return valid.sum().to(torch.float32)
    weights = class_weight[torch.where(valid, target, 0)]
    total = torch.where(valid, weights, 0.0).sum()
    return total.to(torch.promote_types(total.dtype, torch.float32))


class LossWatch(TorchCalls):
    """Records the cross entropies that are computed while it is active.

    ``weight(loss, rows)`` is the divisor of the one whose result is ``loss`` itself, else ``rows``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, and record its targets if it is a cross entropy."""
        result = func(*args, **kwargs)
        if func is functional.cross_entropy or func is functional.nll_loss:
            weight = call_weight(*args, **kwargs)
            if weight is not None:
                target = args[1] if len(args) > 1 else kwargs["target"]
                self._found.append((result, weight, target))
        return result

    def weight(self, loss: torch.Tensor, rows: int) -> torch.Tensor:
        """The number of terms that ``loss`` averages, as a 0-dim float tensor.

        Raises:
            BadInput: it is computed from a cross entropy that ignores targets of some rows.
        """
        for result, weight, _ in self._found:
            if loss is result:
                return weight
        if not all(every_target_counts(divisor, target) for _, divisor, target in self._found):
            raise BadInput(
                "the loss of the chain is computed from a cross entropy that ignores targets, or "
                "has class weights, so its slices cannot be weighted; return that cross entropy "
                "itself, or write the model as a module that is traced"
            )
        return loss.detach().new_full((), float(rows), dtype=torch.float32)


def call_weight(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """The divisor of a call of ``cross_entropy`` or ``nll_loss``; the parameters are theirs."""
    if reduction == "sum" or size_average is False:
        raise BadInput(
            'the loss is cross entropy with reduction="sum", but micro-batches are combined as '
            'means; use reduction="mean" and scale the learning rate'
        )
    if reduction != "mean" or reduce is False:
        return None
    with torch.no_grad():
        return target_weight(target, weight, ignore_index)


def every_target_counts(divisor: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a cross entropy weights all targets equally; true for tensors without values."""
    if target.is_floating_point() or target.is_meta or isinstance(target, FakeTensor):
        return True
    return bool(divisor == target.numel())
