"""Optimizer state divided among the ranks that hold the same parameters (ZeRO, stage 1).

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
section 5.1: each rank keeps the optimizer's state of a part of the parameters, gets the summed
gradients of that part only, steps it, and hands the new values to the others. Here a part is made
of whole parameters, so that optimizers that look at a whole matrix work as well, and the parts are
balanced by size over all holders of a parameter: replicas, stages that are tied, and mirrored
copies. The bytes sent are those of the all-reduce that it replaces: a reduction to the owner, and
a broadcast from it.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from penstock.capture.layer_graph import ParameterUse

__all__ = ["flat_parameters", "owners_of_parameters"]


def owners_of_parameters(
    uses: Iterable[ParameterUse], holders: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """For each trained parameter, by its first name, the rank that keeps its optimizer state.

    The largest first, each goes to that of its holders with the fewest bytes so far; those with
    one holder only are counted before. Every rank finds the same.

    >>> uses = [ParameterUse(name, (0,), size, True) for name, size in [("a", 6), ("b", 5)]]
    >>> uses += [ParameterUse("c", (1,), 4, True), ParameterUse("d", (1,), 2, True)]
    >>> both = {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (1,)}
    >>> owners_of_parameters(uses, both)
    {'d': 1, 'a': 0, 'b': 1, 'c': 0}
    """
    trained = [use for use in uses if use.requires_grad and not use.is_buffer]
    loads: dict[int, int] = {}
    owners: dict[str, int] = {}
    for use in sorted(trained, key=lambda use: (len(holders[use.name]) > 1, -use.bytes, use.name)):
        owner = min(holders[use.name], key=lambda rank: loads.get(rank, 0))
        owners[use.name] = owner
        loads[owner] = loads.get(owner, 0) + use.bytes
    return owners


def flat_parameters(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Flat memory for the values of ``parameters``, which become views into it.

    A broadcast then needs no copy. Strides become those of a contiguous tensor.
    """
    first = parameters[0]
    total = sum(parameter.numel() for parameter in parameters)
    flat = torch.empty(total, dtype=first.dtype, device=first.device)
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        view = flat[start:stop].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
        start = stop
    return flat
