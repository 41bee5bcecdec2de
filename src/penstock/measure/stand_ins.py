"""Other tensors in the place of a module's parameters and buffers, for a while."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["standing_in"]


@contextmanager
def standing_in(
    modules: Iterable[nn.Module], make: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """``modules`` with ``make(tensor)`` for each of their tensors; they are as before afterwards.

    A tensor that several modules hold gets one stand-in. A parameter's stand-in is a parameter.
    """
    made: dict[int, torch.Tensor] = {}
    replaced: list[tuple[nn.Module, str, torch.Tensor]] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            value = make(tensor)
            if isinstance(tensor, nn.Parameter) and value is not tensor:
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            made[id(tensor)] = value
        return made[id(tensor)]

    try:
        parts = {id(part): part for module in modules for part in module.modules()}
        for part in parts.values():
            held = (part._parameters | part._buffers).items()
            for name, tensor in [(n, t) for n, t in held if t is not None]:
                value = stand_in(tensor)
                if value is not tensor:
                    replaced.append((part, name, tensor))
                    # Recurrent modules keep a list of their parameters, which this changes too.
                    setattr(part, name, value)
        yield
    finally:
        for part, name, tensor in replaced:
            setattr(part, name, tensor)
