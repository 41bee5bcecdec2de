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
        place, name, otherwise = 1, "p", 0.5
        if func in ATTENTIONS:
            place, name, otherwise = ATTENTIONS[func], "dropout_p", 0.0
        elif func in RECURRENT:
            place = place_of_recurrent(args)
        elif func not in DROPOUTS:
            return func(*args, **kwargs)
        given = args[place] if len(args) > place else kwargs.get(name, otherwise)
        self.dropped |= given > 0 and trains(func, args[place + 1 :], kwargs)
        if len(args) > place:
            return func(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return func(*args, **{**kwargs, name: 0.0})


def trains(func: Callable[..., Any], behind: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a call drops; the flag of training is the first argument ``behind`` p."""
    if behind and func not in ATTENTIONS:
        return bool(behind[0])
    return bool(named.get("training", named.get("train", func not in OFF_BY_DEFAULT)))


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
