"""Handles ``module.to(dtype)`` in forward while a model is traced: no operation, or refused.

    self.classifier = self.classifier.to(self.dtype)      already so: traced as no operation

Tracing has replaced the module's parameters by tensors without values, which cannot be replaced
again.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from penstock.capture.opaque import refused
from penstock.capture.replaced import replaced

__all__ = ["modules_stay"]


@contextlib.contextmanager
def modules_stay() -> Iterator[None]:
    """Within, modules may be moved or cast only to the device and type that they already have.

    Raises:
        CaptureFailed: a parameter or buffer would change; names the line.
    """

    def apply(self: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        if not all(_stays(tensor, function) for tensor in tensors):
            why = "changes the type or the device of parameters in forward"
            raise refused(f"{type(self).__name__}.to", why)
        return self

    with replaced(nn.Module, "_apply", apply):
        yield


def _stays(tensor: torch.Tensor, function: Callable[..., Any]) -> bool:
    """Whether ``function`` returns a tensor like this one unchanged."""
    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch._C.DisableTorchFunction():
        like = torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
        return function(like) is like
