"""The plain tensors inside a quantised weight, by which it is counted, sent and saved.

A tensor subclass that wraps others, as torchao's, says which by ``__tensor_flatten__``, torch's
protocol for traceable wrappers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def wrapper_of(tensor: torch.Tensor) -> Any:
    """The class of a tensor, also of one that was released: it says where the values are."""
    return vars(tensor).get("released", type(tensor))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its values in others."""
    return hasattr(wrapper_of(tensor), "__tensor_flatten__")


def is_quantised(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a quantised weight: a wrapper, or bytes of a class of their own."""
    own = wrapper_of(parameter) is not nn.Parameter
    return is_wrapper(parameter) or (own and parameter.dtype in (torch.uint8, torch.int8))


def parts_of(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors of a tensor, called ``<name>.<part>``; itself, where it wraps none."""
    if not is_wrapper(tensor):
        return {name: tensor}
    names, _ = wrapper_of(tensor).__tensor_flatten__(tensor)
    inner = ((f"{name}.{part}", getattr(tensor, part)) for part in names)
    return {own: plain for part, held in inner for own, plain in parts_of(part, held).items()}


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's values."""
    return sum(plain.numel() * plain.element_size() for plain in parts_of("", tensor).values())


def rebuilt(name: str, like: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor like ``like`` of the ``values`` of its parts; one of them, where it wraps none."""
    if not is_wrapper(like):
        return values[name]
    names, context = wrapper_of(like).__tensor_flatten__(like)
    inner = {part: rebuilt(f"{name}.{part}", getattr(like, part), values) for part in names}
    return wrapper_of(like).__tensor_unflatten__(inner, context, like.shape, like.stride())
