"""A mode through which every call of a torch function goes while it is active."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["TorchCalls"]


class TorchCalls(TorchFunctionMode):
    """While active, `call` stands for every call of a torch function; it may call it itself."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What torch calls instead of ``func``."""
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call ``func(*args, **kwargs)`` gives. The mode is off meanwhile."""
        raise NotImplementedError
