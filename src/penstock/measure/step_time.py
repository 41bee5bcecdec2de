"""Measures the time of an optimizer step."""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn

from penstock.measure.clock import work_s

__all__ = ["measure_step_s_per_byte"]


def measure_step_s_per_byte(
    module: nn.Module,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    *,
    repeats: int = 5,
    shares_cores: bool = False,
) -> float:
    """Seconds of all that a training step does once, per byte of parameters.

    That is: clear the gradients (which are contiguous in memory), compute their norm, scale them
    (mean and clipping), and step the optimizer. The parameters are restored.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return 0.0
    values, kept = [p.detach().clone() for p in parameters], [p.grad for p in parameters]
    flats = [flat_gradients(group) for group in by_dtype(parameters)]
    stepper = optimizer(parameters)

    def step() -> None:
        for flat in flats:
            flat.zero_()
            torch.linalg.vector_norm(flat)
            flat.mul_(1.0)
        stepper.step()

    seconds_of = work_s(parameters[0].device, shares_cores=shares_cores)
    seconds = [seconds_of(step) for _ in range(repeats + 1)]
    with torch.no_grad():
        for parameter, value, gradient in zip(parameters, values, kept, strict=True):
            parameter.copy_(value)
            parameter.grad = gradient
    return median(seconds[1:]) / sum(p.numel() * p.element_size() for p in parameters)


def by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters grouped by type."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Give the parameters zero gradients that are views of one flat tensor, and return that."""
    flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
