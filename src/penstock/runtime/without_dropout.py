"""Dropout switched off for a while, whatever calls it: modules, functions or traced operators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutDropout"]


class WithoutDropout(TorchFunctionMode):
    """While active, dropout passes everything: random masks cannot agree across another cut.

    ``dropped`` says whether there was dropout to switch off. ``types`` are the types of the trained
    numbers that came out of functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False
        self.types: set[torch.dtype] = set()

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
            args = self._dropout(func, args, named)
        elif func in ATTENTIONS:
            args = self._attention(ATTENTIONS[func], args, named)
        elif func in RECURRENT:
            args = self._recurrent(args)
        result = func(*args, **named)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            self.types.add(result.dtype)
        return result

    def _dropout(
        self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]
    ) -> Sequence[Any]:
        # The probability is the first number after the tensor, whatever its name; then comes
        # whether it is training.
        by_default = func not in OFF_BY_DEFAULT
        training = args[2] if len(args) > 2 else named.get("training", by_default)
        self.dropped |= bool(training) and (args[1] if len(args) > 1 else named.get("p", 0.5)) > 0
        args = (args[0], 0.0, *args[2:]) if len(args) > 1 else args
        if "p" in named or len(args) == 1:
            named["p"] = 0.0
        return args

    def _attention(
        self, position: int, args: Sequence[Any], named: dict[str, Any]
    ) -> Sequence[Any]:
        given = args[position] if len(args) > position else named.get("dropout_p", 0.0)
        self.dropped |= given > 0 and bool(named.get("training", True))
        if "dropout_p" in named:
            named["dropout_p"] = 0.0
        return (*args[:position], 0.0, *args[position + 1 :]) if len(args) > position else args

    def _recurrent(self, args: Sequence[Any]) -> Sequence[Any]:
        # (..., weights, biases, layers, dropout, training, ...)
        weights = max(i for i, value in enumerate(args) if isinstance(value, list | tuple))
        at = weights + 3
        self.dropped |= args[at] > 0 and args[at + 1]
        return (*args[:at], 0.0, *args[at + 1 :])


OFF_BY_DEFAULT = frozenset([functional.alpha_dropout, functional.feature_alpha_dropout])

DROPOUTS = frozenset(
    [
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        torch.dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.feature_alpha_dropout,
        torch.ops.aten.dropout.default,
        torch.ops.aten.native_dropout.default,
        torch.ops.aten.feature_dropout.default,
        torch.ops.aten.alpha_dropout.default,
        torch.ops.aten.feature_alpha_dropout.default,
    ]
)

ATTENTIONS: dict[Any, int] = {
    functional.scaled_dot_product_attention: 4,
    torch.ops.aten.scaled_dot_product_attention.default: 4,
    functional.multi_head_attention_forward: 10,
}
"""Where the probability stands among their arguments; it is also known as ``dropout_p``."""

RECURRENT = frozenset(
    [
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
        torch.ops.aten.lstm.input,
        torch.ops.aten.lstm.data,
        torch.ops.aten.gru.input,
        torch.ops.aten.gru.data,
        torch.ops.aten.rnn_tanh.input,
        torch.ops.aten.rnn_tanh.data,
        torch.ops.aten.rnn_relu.input,
        torch.ops.aten.rnn_relu.data,
    ]
)
