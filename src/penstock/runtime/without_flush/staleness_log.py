"""How stale the weights of a stage were, and how far predictions missed: measured as it happens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["PassRecord", "PredictionError", "StalenessLog"]

REMEMBERED = 4096
"""Records of each kind that wait to be taken; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """When a stage worked on a micro-batch, in updates of its weights made by then.

    The gradient is applied ``difference`` updates after the forward saw the newest weights.
    """

    stage: int
    micro_batch: int
    updates_at_forward: int
    updates_at_backward: int

    @property
    def difference(self) -> int:
        """Updates of the stage between the forward and the backward."""
        return self.updates_at_backward - self.updates_at_forward


@dataclass(frozen=True, slots=True)
class PredictionError:
    """How far a prediction missed the weights that came, and how far the weights of then did.

    ``predicted`` is |W_hat - W_future|, ``stale`` |W - W_future|, both Euclidean over all
    parameters of the stage, ``lead`` updates after the prediction was made. ``size`` is the number
    of weights, so ``predicted / sqrt(size)`` is a root mean square.
    """

    stage: int
    micro_batch: int
    lead: int
    predicted: float
    stale: float
    size: int

    @property
    def ratio(self) -> float:
        """The error left by the prediction; below 1 it is better than none."""
        return self.predicted / self.stale if self.stale > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Pending:
    """A prediction whose future has not come yet."""

    micro_batch: int
    lead: int
    due: int
    predicted: list[torch.Tensor]
    stale: list[torch.Tensor]


class StalenessLog:
    """What one stage notes; `take_passes` and `take_errors` hand over what is new.

    One prediction in ``measure_every`` updates is followed up until its future has come (0: none),
    which keeps two more copies of the weights meanwhile.
    """

    def __init__(self, stage: int, measure_every: int = 0) -> None:
        self.stage = stage
        self.measure_every = measure_every
        self._passes: deque[PassRecord] = deque(maxlen=REMEMBERED)
        self._errors: deque[PredictionError] = deque(maxlen=REMEMBERED)
        self._pending: Pending | None = None
        self._next = 0

    def passed(self, record: PassRecord) -> None:
        """Note a micro-batch whose backward has ended."""
        self._passes.append(record)

    def predicted(
        self,
        micro_batch: int,
        updates: int,
        lead: int,
        leaves: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """After ``updates`` updates a prediction was made: follow it up, if it is time to."""
        if not self.measure_every or self._pending is not None or updates < self._next:
            return
        self._next = updates + self.measure_every
        self._pending = Pending(
            micro_batch,
            lead,
            updates + lead,
            [leaf.detach().clone() for leaf in leaves],
            [parameter.detach().clone() for parameter in parameters],
        )

    def updated(self, updates: int, parameters: Sequence[torch.Tensor]) -> None:
        """The weights have changed for the ``updates``-th time: compare what was predicted."""
        pending = self._pending
        if pending is None or updates < pending.due:
            return
        self._pending = None
        size = sum(parameter.numel() for parameter in parameters)
        self._errors.append(
            PredictionError(
                self.stage,
                pending.micro_batch,
                pending.lead,
                distance(pending.predicted, parameters),
                distance(pending.stale, parameters),
                size,
            )
        )

    def restart(self) -> None:
        """Updates are counted from 0 again."""
        self._pending = None
        self._next = 0

    def take_passes(self) -> list[PassRecord]:
        """The micro-batches since the last call."""
        taken = list(self._passes)
        self._passes.clear()
        return taken

    def take_errors(self) -> list[PredictionError]:
        """The predictions followed up since the last call."""
        taken = list(self._errors)
        self._errors.clear()
        return taken


def distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The Euclidean distance between two lists of tensors."""
    gaps = [
        torch.linalg.vector_norm((a - b.detach()).double())
        for a, b in zip(ours, theirs, strict=True)
    ]
    return float(torch.stack(gaps).square().sum().sqrt()) if gaps else 0.0
