"""Switch dropout off in modules and functions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from penstock.capture.record.torch_calls import TorchCalls


class WithoutDropout(TorchCalls):
    """Switch of dropout, off while active: random masks differ between different cuts of a batch.

    ``dropped``: there was dropout to switch off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropped = False

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Set the probability of every dropout to zero, and call everything else unchanged."""
        given, named = args, dict(kwargs)
        self.dropped |= drops(func, args, named)
        if func in DROPOUTS:
            if "p" in named or len(args) == 1:
                named["p"] = 0.0
            given = with_zero_at(1, args)
        elif func in ATTENTIONS:
            given = with_zero_at(ATTENTIONS[func], args)
            if "dropout_p" in named:
                named["dropout_p"] = 0.0
        elif func in RECURRENT:
            given = with_zero_at(place_of_recurrent(args), args)
        return func(*given, **named)


def drops(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a call is dropout in training with a probability above 0."""
    if func in DROPOUTS:
        # The probability is the first number after the tensor, whatever its name. The flag of
        # training follows it.
        by_default = named.get("training", named.get("train", func not in OFF_BY_DEFAULT))
        training = args[2] if len(args) > 2 else by_default
        return bool(training) and (args[1] if len(args) > 1 else named.get("p", 0.5)) > 0
    if func in ATTENTIONS:
        at = ATTENTIONS[func]
        given = args[at] if len(args) > at else named.get("dropout_p", 0.0)
        return given > 0 and bool(named.get("training", True))
    if func in RECURRENT:
        at = place_of_recurrent(args)
        return args[at] > 0 and args[at + 1]
    return False


def with_zero_at(place: int, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments with a zero at index ``place``, if there are that many."""
    return (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args


def place_of_recurrent(args: Sequence[Any]) -> int:
    """The index of the probability in (..., weights, biases, layers, dropout, training, ...)."""
    return max(i for i, value in enumerate(args) if isinstance(value, list | tuple)) + 3


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
"""Functions with the index of their dropout probability, also known as ``dropout_p``."""

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
