"""Divides optimizer state among the ranks that hold the same parameters (ZeRO, stage 1).

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
section 5.1: each rank keeps the optimizer state of a part of the parameters. It gets the summed
gradients of that part only, steps it, and sends the new values to the others. Here a part consists
of whole parameters, so that optimizers that need whole matrices work as well. The parts are
balanced by bytes over all holders of a parameter: replicas, tied stages, and mirrored copies. A
reduce to the owner and a broadcast from it send the same number of bytes as the all-reduce that
they replace.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from penstock.capture.stage_program import ParameterUse

__all__ = ["flat_parameters", "owners_of_parameters"]


def owners_of_parameters(
    uses: Iterable[ParameterUse], holders: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """For each trained parameter, by its first name, the rank that keeps its optimizer state.

    Parameters with a single holder are assigned first. The others follow, largest first; each goes
    to the holder with the fewest bytes so far. Every rank gets the same result.

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
    """Flat memory for the values of ``parameters``, which become contiguous views into it.

    A broadcast then needs no copy.
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
