"""Finds the line that draws random numbers: a pipeline draws them in another order."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.capture.torch_calls import TorchCalls
from penstock.runtime.stages.replay import random_state

__all__ = ["random_call"]

LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[2])


def random_call(run: Callable[[], object], device: torch.device) -> str:
    """The first call in ``run()`` that draws random numbers, such as ``rand at model.py:12``."""
    watch = RandomCalls(device)
    with watch:
        run()
    return watch.found or "a call that torch's functions do not show"


class RandomCalls(TorchCalls):
    """While active, finds the first function that changes the state of a generator; slow."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.found = ""
        self._device = device

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func``, and compare the generators' states before and after."""
        if self.found:
            return func(*args, **kwargs)
        before = random_state(self._device)
        result = func(*args, **kwargs)
        after = random_state(self._device)
        pairs = zip(before, after, strict=True)
        if any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs):
            self.found = f"{getattr(func, '__name__', func)} at {user_line()}"
        return result


def user_line() -> str:
    """``file:line`` of the innermost caller outside torch and Penstock."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.exists() and not any(path.is_relative_to(library) for library in LIBRARIES):
            return f"{frame.filename}:{frame.lineno}"
    return "a line of torch"
