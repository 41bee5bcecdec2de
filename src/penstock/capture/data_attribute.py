"""Makes ``tensor.data`` an operator while a model is traced.

    self.weight.data.clamp_(-1, 1)       in a stage, too, autograd does not record the write
    teacher.data = m * teacher.data      the same as teacher.data.copy_(m * teacher.data)

Otherwise tracing would treat the result of ``.data`` as a constant, and lose what is assigned.
"""

from collections.abc import Callable
from typing import Any

import torch

from penstock.capture.capture_errors import REMEDY, current_line
from penstock.capture.operators import same_shape
from penstock.capture.torch_calls import TorchCalls
from penstock.errors import CaptureFailed

__all__ = ["KeepData"]

_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define("data(Tensor(a) tensor) -> Tensor(a)")


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.alias.default(tensor)


_LIBRARY.impl("data", _data, "Autograd")
_LIBRARY.impl("data", _alias, "CompositeExplicitAutograd")

_OF_A_TENSOR: Any = torch.Tensor.data


class KeepData(TorchCalls):
    """Records each ``.data`` as an operator."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, or the operator that replaces it."""
        if func == _OF_A_TENSOR.__get__:
            return torch.ops.penstock.data(args[0])
        if func == _OF_A_TENSOR.__set__:
            tensor, value = args
            if tensor.dtype != value.dtype or not same_shape(tensor, value):
                raise CaptureFailed(
                    f"forward gives .data another type or shape at {current_line()}, which a "
                    f"captured model cannot follow; make a new tensor, or {REMEDY}"
                )
            return torch.ops.penstock.data(tensor).copy_(value.detach())
        return func(*args, **kwargs)
