"""Finds how many terms a mean loss averages, while the loss function runs.

Micro-batches with unequal numbers of valid targets must not be averaged equally. For losses that
end in cross entropy (or negative log likelihood) the divisor is known exactly: the valid targets,
or the sum of their class weights (the formulas of ``torch.nn.CrossEntropyLoss``).
"""

import torch

from penstock.errors import BadInput

__all__ = ["call_weight", "target_weight"]


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
