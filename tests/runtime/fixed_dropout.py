"""Dropout whose masks follow from the data, so that they are the same however a model is cut."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from penstock.runtime.verify.without_dropout import DROPOUTS

STRETCH = 1e4
"""Spreads the sines of neighbouring numbers; far below 1e16, so that rounding flips no mask."""


class FixedDropout(TorchFunctionMode):
    """While active, dropout drops an element or not by the digits of that element."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Drop by the data where dropout is asked for in training, let everything else pass."""
        named = dict(kwargs or {})
        if func not in DROPOUTS:
            return func(*args, **named)
        x = args[0] if args else named["input"]
        p = float(args[1] if len(args) > 1 else named.get("p", 0.5))
        training = bool(args[2] if len(args) > 2 else named.get("training", named.get("train")))
        return dropped(x, p) if training and p > 0 else x


def dropped(x: torch.Tensor, p: float) -> torch.Tensor:
    """``x`` with about a share ``p`` of its elements zero, the others larger by as much."""
    digits = torch.frac((torch.sin(x.detach().double()) * STRETCH).abs())
    return x * (digits >= p).to(x.dtype) / (1 - p)
