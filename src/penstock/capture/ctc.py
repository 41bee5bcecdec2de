"""Connectionist temporal classification (CTC), which cannot be traced: sizes depend on the targets.

    ctc_loss(log_probs, targets, lengths...)  ->  one loss a sample, kept whole
                                              ->  reduction, as plain operators

The losses of the samples are one opaque operator. The reduction of `torch.nn.functional.ctc_loss`
(the sum, or the mean of losses over target lengths) is traced like any other. So slices of a batch
are weighted as for any other loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.nn import functional

from penstock.capture.capture_errors import REMEDY, current_line
from penstock.capture.opaque import OpaqueTable, call_opaquely
from penstock.capture.torch_calls import TorchCalls
from penstock.errors import CaptureFailed

__all__ = ["KeepCtc"]


class KeepCtc(TorchCalls):
    """While tracing, makes ``ctc_loss`` an opaque operator of ``table`` and a reduction."""

    def __init__(self, table: OpaqueTable) -> None:
        super().__init__()
        self._table = table

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, or keep it whole if it is ``ctc_loss``."""
        if func is functional.ctc_loss:
            with self:
                return _ctc_loss(self._table, *args, **kwargs)
        return func(*args, **kwargs)


def _ctc_loss(
    table: OpaqueTable,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The parameters are those of `torch.nn.functional.ctc_loss`."""
    for lengths in (input_lengths, target_lengths):
        if not isinstance(lengths, torch.Tensor):
            raise CaptureFailed(
                f"ctc_loss at {current_line()} gets lengths that are no tensor, but slices of a "
                f"batch have lengths of their own; compute them from the batch, or {REMEDY}"
            )
    arguments = (log_probs, targets, input_lengths, target_lengths)
    settings = (blank, zero_infinity, torch.backends.cudnn.enabled)
    losses = call_opaquely(table, _losses, (*arguments, *settings), name="ctc_loss")
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        # ATen/native/LossCTC.cpp counts empty targets as one word.
        return (losses / target_lengths.to(losses).clamp_min(1)).mean()
    return losses


def _losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
    with_cudnn: bool,
) -> torch.Tensor:
    """One loss for each sample; for tensors without values, an empty tensor of that shape."""
    if isinstance(log_probs, FakeTensor) or log_probs.is_meta:
        return log_probs.sum((0, -1))
    with torch.backends.cudnn.flags(enabled=with_cudnn):
        return functional.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity
        )
