"""What shows that a number is not finite: in which layer, in which micro-batch, in which pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from penstock.capture.layer_graph import TensorSpec

__all__ = ["PASSES", "Sign", "SignLog", "is_sound"]

Pass: TypeAlias = Literal["weights", "forward", "backward"]

PASSES: tuple[Pass, ...] = ("weights", "forward", "backward")
"""In the order in which a bad number spreads."""


@dataclass(frozen=True, order=True)
class Sign:
    """A tensor that is not finite. Of two signs the smaller one is nearer to the cause.

    ``order`` counts layers in the order of the pass, so backwards it is negative. ``tensor`` is the
    name of a parameter, if the sign is its value or its gradient.
    """

    number: int
    micro_batch: int
    order: int
    rank: int
    stage: int
    tensor: str = ""

    @property
    def layer(self) -> int:
        """The number of the layer."""
        return abs(self.order)


@dataclass
class SignLog:
    """The signs of one rank; only the one nearest to the cause is kept."""

    rank: int
    first: Sign | None = None

    def add(
        self, kind: Pass, stage: int, layer: int, micro_batch: int = 0, tensor: str = ""
    ) -> None:
        """Note a tensor of a layer that is not finite."""
        order = -layer if kind == "backward" else layer
        sign = Sign(PASSES.index(kind), micro_batch, order, self.rank, stage, tensor)
        self.first = sign if self.first is None else min(self.first, sign)


def is_sound(tensors: Sequence[torch.Tensor | None], specs: Sequence[TensorSpec]) -> bool:
    """Whether tensors between layers are finite.

    A tensor without a gradient may have infinite values: masks of attention do.
    """
    for tensor, spec in zip(tensors, specs, strict=False):
        if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = ~tensor.isfinite() if spec.requires_grad else tensor.isnan()
        if bad.any():
            return False
    return True
