"""Staleness of a stage's weights, and error of predicted weights."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

REMEMBERED = 4096
"""The most records of each kind that are kept; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """The number of updates of a stage at the forward and at the backward of a micro-batch.

    Its gradient is applied ``difference`` updates after the forward saw the newest weights.
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
    """The error of predicted weights, and the error of the weights without prediction.

    ``predicted`` is |W_hat - W_future| and ``stale`` is |W - W_future|, both Euclidean norms over
    all parameters of the stage, ``lead`` updates after the prediction. ``size`` is the number of
    weights, so ``predicted / sqrt(size)`` is a root mean square.
    """

    stage: int
    micro_batch: int
    lead: int
    predicted: float
    stale: float
    size: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A prediction that cannot be checked yet."""

    micro_batch: int
    lead: int
    due: int
    predicted: list[torch.Tensor]
    stale: list[torch.Tensor]


class StalenessLog:
    """The latest records of one stage: its ``passes``, and the ``errors`` of predictions.

    One prediction in ``measure_every`` updates is kept until it can be checked (0: none). Two more
    copies of the weights are kept meanwhile.
    """

    def __init__(self, stage: int) -> None:
        self.stage, self.measure_every = stage, 0
        self.passes: deque[PassRecord] = deque(maxlen=REMEMBERED)
        self.errors: deque[PredictionError] = deque(maxlen=REMEMBERED)
        self._new: tuple[list[PassRecord], list[PredictionError]] = [], []
        self._pending: Pending | None = None
        self._next = 0

    def passed(self, record: PassRecord) -> None:
        """Record a micro-batch whose backward has ended."""
        self.passes.append(record)
        self._new[0].append(record)

    def predicted(
        self,
        micro_batch: int,
        updates: int,
        lead: int,
        leaves: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Keep a prediction made after ``updates`` updates, if one is to be measured now."""
        if not self.measure_every or self._pending is not None or updates < self._next:
            return
        self._next = updates + self.measure_every
        copies = [[tensor.detach().clone() for tensor in each] for each in (leaves, parameters)]
        self._pending = Pending(micro_batch, lead, updates + lead, *copies)

    def updated(self, updates: int, parameters: Sequence[torch.Tensor]) -> None:
        """Check a kept prediction after the ``updates``-th update, if it was made for it."""
        pending = self._pending
        if pending is None or updates < pending.due:
            return
        self._pending = None
        missed, stale = (distance(each, parameters) for each in (pending.predicted, pending.stale))
        size = sum(parameter.numel() for parameter in parameters)
        error = PredictionError(self.stage, pending.micro_batch, pending.lead, missed, stale, size)
        self.errors.append(error)
        self._new[1].append(error)

    def restart(self) -> None:
        """Count updates from 0 again."""
        self._pending = None
        self._next = 0

    def take_new(self) -> tuple[list[PassRecord], list[PredictionError]]:
        """The records since the last call."""
        taken, self._new = self._new, ([], [])
        return taken


def distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The Euclidean distance between two lists of tensors."""
    gaps = [
        torch.linalg.vector_norm((a - b.detach()).double())
        for a, b in zip(ours, theirs, strict=True)
    ]
    return float(torch.stack(gaps).square().sum().sqrt()) if gaps else 0.0
