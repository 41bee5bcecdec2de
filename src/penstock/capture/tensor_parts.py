"""The plain tensors inside a quantised weight, by which it is counted, sent and saved.

A tensor subclass that wraps others, as torchao's, says which by ``__tensor_flatten__``, torch's
protocol for traceable wrappers. A weight of bitsandbytes is a tensor of bytes, and has their scales
in an object beside it.
"""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import nn

SCALES = "quant_state"
"""The attribute in which a weight of bitsandbytes has the scales of its bytes."""


def wrapper_of(tensor: torch.Tensor) -> Any:
    """The class of a tensor, also of one that was released: it says where the values are."""
    return vars(tensor).get("released", type(tensor))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its values in others."""
    return hasattr(wrapper_of(tensor), "__tensor_flatten__")


def is_quantised(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a quantised weight: a wrapper, or bytes of their own class."""
    own = wrapper_of(parameter) is not nn.Parameter
    return is_wrapper(parameter) or (own and parameter.dtype in (torch.uint8, torch.int8))


def plain_parts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors of a tensor, called ``<name>.<part>``; itself, where it wraps none."""
    if not is_wrapper(tensor):
        found = {name: tensor}
        scales = vars(tensor).get(SCALES)
        if scales is not None:
            scales_like(scales, found.setdefault, f"{name}.{SCALES}")
        return found
    names, _ = wrapper_of(tensor).__tensor_flatten__(tensor)
    inner = ((f"{name}.{part}", getattr(tensor, part)) for part in names)
    return {own: plain for part, held in inner for own, plain in plain_parts(part, held).items()}


def value_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's values."""
    return sum(plain.numel() * plain.element_size() for plain in plain_parts("", tensor).values())


def rebuilt(name: str, like: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor like ``like`` of the ``values`` of its parts; one of them, where it wraps none."""
    if not is_wrapper(like):
        made = values[name].detach()
        return give_scales(made, like, lambda part, old: values[part].to(old.dtype), name)
    names, context = wrapper_of(like).__tensor_flatten__(like)
    inner = {part: rebuilt(f"{name}.{part}", getattr(like, part), values) for part in names}
    return wrapper_of(like).__tensor_unflatten__(inner, context, like.shape, like.stride())


def scales_like(
    scales: Any, make: Callable[[str, torch.Tensor], torch.Tensor], name: str = SCALES
) -> Any:
    """A copy of a weight's scales with ``make(name, tensor)`` for each tensor; they may nest."""
    made = copy(scales)
    for key, value in vars(scales).items():
        if isinstance(value, torch.Tensor):
            setattr(made, key, make(f"{name}.{key}", value))
        elif type(value) is type(scales):
            setattr(made, key, scales_like(value, make, f"{name}.{key}"))
    return made


def give_scales(
    tensor: torch.Tensor,
    like: torch.Tensor,
    make: Callable[[str, torch.Tensor], torch.Tensor],
    name: str = "",
) -> torch.Tensor:
    """Give ``tensor`` scales as those of ``like``, if that has any; returns the tensor."""
    scales = vars(like).get(SCALES)
    if scales is not None:
        vars(tensor)[SCALES] = scales_like(scales, make, f"{name}.{SCALES}")
    return tensor


def unquantised(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and the type of the weight that a quantised one was, or will be, made of."""
    own = vars(tensor).get(SCALES, tensor)
    return tuple(own.shape), own.dtype


def become(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a parameter the values and the class of another; the user's own object stays."""
    if not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, value)
