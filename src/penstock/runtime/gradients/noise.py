"""The gradient noise scale: up to about this many samples, a larger batch makes a better step.

McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix A.1: with the squared
norms of gradients over a small batch of b samples and a big batch of B samples,

    |G|^2    = (B |G_big|^2 - b |G_small|^2) / (B - b)       the true gradient's square
    tr(S)    = (|G_small|^2 - |G_big|^2) / (1/b - 1/B)       variance of one sample's gradient
    noise scale = tr(S) / |G|^2                              in samples

The first two have no bias. Both are averaged over the steps before they are divided. A small batch
is what a rank has before gradients are summed: the rows of a replica or, in a step of several
batches, the rows of a rank in the first batch. Both squares are sums over parameters. So every
bucket of gradients is estimated with its own b, and the estimates are added.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.capture.layer_graph import ParameterUse
from penstock.errors import BadInput
from penstock.plan.plan import Plan
from penstock.runtime.gradients.bucket import GradientBucket
from penstock.runtime.micro_batches import BatchCut

__all__ = ["GradientNoise", "NoiseAverage", "NoiseMeter", "check_replicated"]

KEPT_SHARE = 0.95
"""The weight of the old average in each step: it covers about 20 steps."""


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """The estimates of gradient noise of one step.

    ``variance`` (the trace of the covariance of one sample's gradient) and ``square_norm`` (of the
    true gradient) come from this step alone and scatter: ``square_norm`` may be negative. ``scale``
    is the ratio of their averages over the last steps, in samples. It is ``None`` while the average
    of ``square_norm`` is not positive.
    """

    variance: float
    square_norm: float
    scale: float | None


class NoiseMeter:
    """This rank's share of the estimate, measured before and after gradients are summed."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._rows: Mapping[int, Mapping[int, int]] = {}
        self._samples = 0
        self._squares: dict[GradientBucket, torch.Tensor] = {}

    def begin(self, small: BatchCut, samples: int) -> None:
        """Start a step of ``samples`` samples; ``small`` gives its small batches."""
        plan, stages = self._plan, range(len(self._plan.stages))
        self._rows = {
            rank: {stage: rows_of_rank(plan, small, stage, rank) for stage in stages}
            for rank in plan.devices
        }
        self._samples = samples
        self._squares = {}

    def measure(self, bucket: GradientBucket) -> None:
        """Measure the norm of a bucket while it holds only this rank's own gradients."""
        self._squares[bucket] = bucket.square()

    def totals(self, buckets: Iterable[GradientBucket]) -> tuple[float, float]:
        """This rank's shares of the variance and of the gradient's square, to be added over ranks.

        Both are of the summed loss. Divide them by the square of the total weight for the mean.
        """
        variance = square = 0.0
        for bucket in buckets:
            rows = self._small_batches(bucket)
            weight = sum(1 / count - 1 / self._samples for count in rows.values())
            if weight <= 0:
                continue
            if self._rank in rows and bucket in self._squares:
                share = self._samples / rows[self._rank]
                variance += share**2 * float(self._squares[bucket]) / weight
            if bucket.owner == self._rank:
                found = float(bucket.square())
                variance -= len(rows) * found / weight
                square += found
        return variance, square

    def _small_batches(self, bucket: GradientBucket) -> dict[int, int]:
        """The rows of each holder that has any.

        Empty if the stages that share a tied parameter have different rows on a rank: its gradient
        then lacks some stages' share for some samples.
        """
        found: dict[int, int] = {}
        for rank in bucket.holders:
            counts = {self._rows[rank][stage] for stage in bucket.stages}
            if len(counts) > 1:
                return {}
            (count,) = counts
            if count:
                found[rank] = count
        return found


class NoiseAverage:
    """Running averages of the variance and the squared norm."""

    def __init__(self) -> None:
        self._variance = self._square_norm = 0.0

    def add(self, variance: float, square: float, samples: int) -> GradientNoise:
        """Add a step's variance and the square of its whole gradient, over ``samples`` samples."""
        square_norm = square - variance / samples
        # Both averages start at 0 and lack the same share, so their ratio has no bias.
        self._variance += (1 - KEPT_SHARE) * (variance - self._variance)
        self._square_norm += (1 - KEPT_SHARE) * (square_norm - self._square_norm)
        positive = self._square_norm > 0
        scale = max(0.0, self._variance / self._square_norm) if positive else None
        return GradientNoise(variance, square_norm, scale)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"variance": self._variance, "square_norm": self._square_norm}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._variance = float(state["variance"])
        self._square_norm = float(state["square_norm"])


def check_replicated(uses: Iterable[ParameterUse], holders: Mapping[str, Sequence[int]]) -> None:
    """Raise `BadInput` if a parameter without replicas leaves no small batches to measure."""
    for use in uses:
        if use.requires_grad and not use.is_buffer and len(holders[use.name]) == 1:
            raise BadInput(
                f"gradient_noise needs gradients of two batch sizes, but '{use.name}' has one "
                f"replica and the step one batch; give step() several batches, or plan replicas "
                f"for every stage"
            )


def rows_of_rank(plan: Plan, cut: BatchCut, stage: int, rank: int) -> int:
    """The number of samples of a batch that ``rank`` computes for ``stage``."""
    devices: Sequence[Sequence[int]] = [
        plan.holder(stage, m).devices for m in range(len(cut.micro_batches))
    ]
    return sum(
        cut.slices[m][stage][own.index(rank)] for m, own in enumerate(devices) if rank in own
    )
