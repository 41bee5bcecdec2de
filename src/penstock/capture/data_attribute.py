"""``tensor.data`` while a model is traced: an operator that gives the tensor without its history.

    self.weight.data.clamp_(-1, 1)       in a stage, too, autograd does not hear of the write

Tracing would take what ``.data`` gives for a constant.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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


class KeepData(TorchFunctionMode):
    """Records each ``.data`` as that operator."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, or the operator in its place."""
        if func == _OF_A_TENSOR.__get__:
            return torch.ops.penstock.data(args[0])
        return func(*args, **(kwargs or {}))
