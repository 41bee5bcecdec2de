"""Which weights a micro-batch's forward and backward use, where updates do not wait for a flush."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["SYNCHRONOUS", "OptimizerSync", "Prediction", "Version", "WeightRule"]

OptimizerSync: TypeAlias = Literal["before", "after"]
"""Where updates wait for a flush: whether ranks agree on a step before they take it, or after."""

Prediction: TypeAlias = Literal["none", "momentum", "adam", "optimizer"]
"""From what the weights of a later step are predicted in the method's paper: SpecTrain's momentum,
XPipe's Adam step, the step of any optimizer."""

Version: TypeAlias = Literal["newest", "forward", "first-stage", "update-before"]
"""What the two passes of a micro-batch start from: each pass from the newest weights of its stage;
both from those of the stage's forward; both from the version that stage 0 had in its forward; both
from the version before the one that the micro-batches of the update before have made."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The weight versions of a schedule.

    A stage updates its weights after every ``micro_batches_per_update`` backwards, without waiting
    for other stages; 0 stands for one update at the end of the iteration, after a flush.
    ``versions[stage]`` is how many copies of its weights a stage keeps (empty: one).
    ``version`` says which weights the passes of a micro-batch start from.
    ``forward_lead[stage]`` and ``backward_lead[stage]`` are how many updates ahead of those the
    weights are predicted for a forward and for a backward (empty: not at all). With ``bellwether``
    a prediction is made for the first of an update's micro-batches, and the others use it too.
    """

    micro_batches_per_update: int = 0
    versions: tuple[int, ...] = ()
    prediction: Prediction = "none"
    forward_lead: tuple[int, ...] = ()
    backward_lead: tuple[int, ...] = ()
    version: Version = "newest"
    bellwether: bool = False

    def versions_of(self, stage: int) -> int:
        """How many copies of its weights ``stage`` keeps."""
        return self.versions[stage] if self.versions else 1

    def leads_of(self, stage: int) -> tuple[int, int]:
        """How many updates ahead ``stage`` predicts, for a forward and for a backward."""
        forward = self.forward_lead[stage] if self.forward_lead else 0
        return forward, self.backward_lead[stage] if self.backward_lead else 0

    def predictions_of(self, stage: int) -> int:
        """How many times ``stage`` writes predicted weights for each update.

        For the forwards and for the backwards of an update, also where these see the newest ones,
        as both have one place; once where backwards use what the forwards had.
        """
        if not any(self.leads_of(stage)):
            return 0
        return 1 if self.version == "forward" else 2


SYNCHRONOUS = WeightRule()
"""One version of the weights and one update, after the flush: the gradients of one device."""
