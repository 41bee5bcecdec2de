"""The numbers that all ranks exchange at the end of an iteration."""

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch

from penstock.capture.batch_part import Leaf
from penstock.runtime.clock import StepClock
from penstock.runtime.gradients.buckets import GradientBuckets
from penstock.runtime.metrics import RankTotals, Totals, fingerprint
from penstock.runtime.stages.runner import LossTerm
from penstock.runtime.transport.transport import Transport, announced
from penstock.runtime.user_metrics import Means, MetricSums

__all__ = ["END", "PAUSE", "RankNumbers"]

PAUSE, END = 1, 2
"""Why the ranks stop: to go on later, or because the training is over."""

COUNT = len(fields(RankTotals))


class RankNumbers:
    """This rank's numbers, and the combined numbers of all ranks.

    ``wants_stop`` is the reason for which this rank asks all to stop, or 0. ``stopping`` is the
    largest such reason of all ranks by the latest exchange. ``optimizer_s`` is the duration of its
    latest optimizer step.
    """

    def __init__(self, transport: Transport | None, clock: StepClock, devices: int) -> None:
        self.wants_stop = self.stopping = 0
        self.optimizer_s = 0.0
        self._transport, self._clock = transport, clock
        self._devices = devices

    def own(
        self,
        batches: Sequence[Sequence[Leaf]],
        terms: Sequence[LossTerm],
        buckets: GradientBuckets | None,
        metrics: MetricSums | None,
    ) -> list[float]:
        """This rank's numbers of an iteration; ``buckets`` are given in training."""
        loss_sum = weight = 0.0
        if terms:
            losses = torch.stack([term.loss for term in terms]).double()
            weights = torch.stack([term.weight for term in terms]).to(losses)
            weight = float(weights.sum())
            loss_sum = float(torch.where(weights > 0, losses * weights, 0.0).sum())
        totals = RankTotals(
            loss_sum,
            weight,
            buckets.square_sum() if buckets is not None else 0.0,
            self._clock.busy_s,
            self._clock.now() - self._clock.start_s,
            self.optimizer_s,
            float(sum(leaves[0].shape[0] for leaves in batches)),
            sum(n * fingerprint(leaf) for n, leaves in enumerate(batches, 1) for leaf in leaves),
        )
        measured = metrics.totals() if metrics is not None else ()
        return [*totals.values(), float(self.wants_stop), *measured]

    def put_together(
        self, rows: Sequence[list[float]], metrics: MetricSums | None, seed: float = 1.0
    ) -> tuple[Totals, Means]:
        """The totals of an iteration and the means of metrics, from the numbers of every rank.

        Raises:
            BadInput: the ranks were given different batches.
        """
        totals = Totals.of([row[:COUNT] for row in rows], self._devices, seed)
        self.stopping = int(max(row[COUNT] for row in rows))
        if metrics is None:
            return totals, {}
        return totals, metrics.combined([row[COUNT + 1 :] for row in rows])

    def exchange(self, values: list[float], what: str) -> list[list[float]]:
        """Exchange numbers: returns those of every rank, by rank."""
        return self.announce(values, what)()

    def announce(self, values: list[float], what: str) -> Callable[[], list[list[float]]]:
        """Send numbers of this rank. The returned function waits for those of all, by rank.

        Every rank must call it before the next `announce`.
        """
        return announced(self._transport, values, what)
