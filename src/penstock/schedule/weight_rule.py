"""Weight versions that the passes of a micro-batch use, in schedules without a flush."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Prediction: TypeAlias = Literal["none", "momentum", "adam", "optimizer"]
"""Prediction of a later step's weights in a method's paper: from momentum (SpecTrain), from Adam's
step (XPipe), or from the step of any optimizer (PipeOptim)."""

Version: TypeAlias = Literal["newest", "forward", "first-stage", "update-before"]
"""Weights that the passes of a micro-batch start from. newest: each pass from the newest of its
stage. forward: both from those of the stage's forward. first-stage: both from the version that
stage 0 had in its forward. update-before: both from the weights as they were before the previous
update.
"""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The weight versions of a schedule.

    A stage updates its weights after every ``micro_batches_per_update`` backwards, without waiting
    for other stages. 0 means one update at the end of the iteration, after a flush.
    ``versions[stage]`` is how many copies of its weights a stage keeps (empty: one).
    ``version`` says which weights the passes of a micro-batch start from. From these,
    ``forward_lead[stage]`` and ``backward_lead[stage]`` say how many updates ahead the weights of a
    forward and of a backward are predicted (empty: not at all). With ``bellwether`` the first
    micro-batch of an update gets a prediction, and the others use the same (XPipe).
    """

    micro_batches_per_update: int = 0
    versions: tuple[int, ...] = ()
    prediction: Prediction = "none"
    forward_lead: tuple[int, ...] = ()
    backward_lead: tuple[int, ...] = ()
    version: Version = "newest"
    bellwether: bool = False

    def versions_of(self, stage: int) -> int:
        """The number of copies of its weights that ``stage`` keeps."""
        return self.versions[stage] if self.versions else 1

    def leads_of(self, stage: int) -> tuple[int, int]:
        """The number of updates that ``stage`` predicts ahead, for a forward and for a backward."""
        forward = self.forward_lead[stage] if self.forward_lead else 0
        return forward, self.backward_lead[stage] if self.backward_lead else 0

    def predictions_of(self, stage: int) -> int:
        """The number of times ``stage`` writes predicted weights for each update.

        Twice, for the forwards and for the backwards, even if one of these uses the newest weights,
        because both share one buffer. Once if backwards use the weights of the forwards.
        """
        if not any(self.leads_of(stage)):
            return 0
        return 1 if self.version == "forward" else 2


SYNCHRONOUS = WeightRule()
"""One weight version and one update after a flush: the same gradients as on one device."""
