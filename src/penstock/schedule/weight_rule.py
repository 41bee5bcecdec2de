"""Which weights a micro-batch's forward and backward use, where updates do not wait for a flush."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["SYNCHRONOUS", "Prediction", "WeightRule"]

Prediction: TypeAlias = Literal["none", "momentum", "adam"]
"""From what the weights of a later step are predicted: SpecTrain's momentum, XPipe's Adam step."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The weight versions of a schedule.

    A stage updates its weights after every ``micro_batches_per_update`` backwards, without waiting
    for other stages; 0 stands for one update at the end of the iteration, after a flush.
    ``versions[stage]`` is how many copies of its weights a stage keeps (empty: one).
    ``forward_lead[stage]`` and ``backward_lead[stage]`` are how many updates ahead the weights are
    predicted for a forward and for a backward (empty: not at all).
    """

    micro_batches_per_update: int = 0
    versions: tuple[int, ...] = ()
    prediction: Prediction = "none"
    forward_lead: tuple[int, ...] = ()
    backward_lead: tuple[int, ...] = ()

    def versions_of(self, stage: int) -> int:
        """How many copies of its weights ``stage`` keeps."""
        return self.versions[stage] if self.versions else 1


SYNCHRONOUS = WeightRule()
"""One version, one update after the last micro-batch: the gradients of one device."""
