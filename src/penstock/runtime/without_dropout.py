"""Dropout switched off for a while, whatever calls it: modules, functions or traced operators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutDropout"]


class WithoutDropout(TorchFunctionMode):
    """While active, dropout passes everything: random masks cannot agree across another cut."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Set the probability of every dropout to zero, let everything else pass."""
        named = dict(kwargs or {})
        if func in DROPOUTS:
            # The probability is the first number after the tensor, whatever its name.
            args = (args[0], 0.0, *args[2:]) if len(args) > 1 else args
            if "p" in named:
                named["p"] = 0.0
            if len(args) == 1 and "p" not in named:
                named["p"] = 0.0
        elif func in ATTENTIONS:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if "dropout_p" in named:
                named["dropout_p"] = 0.0
        return func(*args, **named)


DROPOUTS = frozenset(
    [
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        torch.dropout,
        torch.feature_dropout,
        torch.ops.aten.dropout.default,
        torch.ops.aten.native_dropout.default,
        torch.ops.aten.feature_dropout.default,
        torch.ops.aten.alpha_dropout.default,
    ]
)
ATTENTIONS = frozenset(
    [
        functional.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    ]
)
