"""Replace a module's parameters and buffers by other tensors for a while."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import sqrt

import torch
from torch import nn

from penstock.capture.tensor_parts import give_scales
from penstock.torch_internals import own_buffers, own_parameters

DRAWN_VALUES = 1 << 20
"""Limit of random values that are drawn, then repeated: drawing is slower than copying."""


def is_on_meta(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of a module is on the meta device."""
    tensors = (*module.parameters(), *module.buffers())
    return any(tensor.device.type == "meta" for tensor in tensors)


def with_values(modules: Iterable[nn.Module], device: torch.device) -> AbstractContextManager[None]:
    """Put ``modules`` on ``device`` for a while, with made-up values for tensors on meta."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        return made_up(tensor, device) if tensor.device.type == "meta" else tensor.to(device)

    return standing_in(modules, make)


def made_up(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Random matrices of the usual size, which take as long to compute with as real weights.

    Vectors (norms, biases) are filled with ones, integers with zeros.
    """
    if not tensor.is_floating_point() or tensor.dim() < 2 or not tensor.numel():
        fill = 1.0 if tensor.is_floating_point() else 0
        return torch.full(tensor.shape, fill, dtype=tensor.dtype, device=device)
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    flat, inputs = value.view(-1), tensor.numel() // tensor.shape[0]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(min(DRAWN_VALUES, len(flat)), generator=generator) / sqrt(inputs)
    for part in flat.split(len(drawn)):
        part.copy_(drawn[: len(part)])
    return value


@contextmanager
def standing_in(
    modules: Iterable[nn.Module], make: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Replace each tensor of ``modules`` by ``make(tensor)``, and restore them afterwards.

    A tensor that several modules hold gets one replacement. A parameter is replaced by a parameter.
    """
    made: dict[int, torch.Tensor] = {}
    replaced: list[tuple[nn.Module, str, torch.Tensor]] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            value = make(tensor)
            if isinstance(tensor, nn.Parameter) and value is not tensor:
                own = nn.Parameter(value, requires_grad=tensor.requires_grad)
                value = give_scales(own, tensor, lambda _, scale: make(scale))
            made[id(tensor)] = value
        return made[id(tensor)]

    try:
        parts = {id(part): part for module in modules for part in module.modules()}
        for part in parts.values():
            held = (own_parameters(part) | own_buffers(part)).items()
            for name, tensor in [(n, t) for n, t in held if t is not None]:
                value = stand_in(tensor)
                if value is not tensor:
                    replaced.append((part, name, tensor))
                    # In recurrent modules `setattr` also updates their list of parameters.
                    setattr(part, name, value)
        yield
    finally:
        for part, name, tensor in replaced:
            setattr(part, name, tensor)
