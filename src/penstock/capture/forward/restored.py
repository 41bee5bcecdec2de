"""Restore what code may change of a model: attributes of modules, and values of buffers."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

CONTAINERS = (list, dict, set, OrderedDict, defaultdict)


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Restore on exit the attributes of modules, also lists and dicts; code may change them.

    Training modes, and which tensors the modules hold, are restored, too.
    """
    kept = [(part.__dict__, dict(part.__dict__)) for part in module.modules()]
    held: list[Any] = [value for _, before in kept for value in before.values()]
    contents = [(value, value.copy()) for value in held if type(value) in CONTAINERS]
    try:
        yield
    finally:
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)
        for container, before in contents:
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)


@contextmanager
def kept_buffers(buffers: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the values of ``buffers`` on leaving."""
    values = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in values:
                if buffer.shape != before.shape:  # observers make theirs larger
                    buffer.resize_(before.shape)
                buffer.copy_(before)
