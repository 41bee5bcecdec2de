"""The result of a training step, and the numbers of all ranks that it is computed from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt

from penstock.capture.batch_part import Leaf, PartialLeaf
from penstock.errors import BadInput, LossNotFinite
from penstock.runtime.gradients.noise import GradientNoise

__all__ = ["NoTerms", "RankTotals", "StepMetrics", "Totals", "clip_factor", "fingerprint"]

FINGERPRINT_VALUES = 256


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The result of one training step, equal on every rank.

    ``loss`` is the mean over all terms of the batch, before the weights are updated.
    ``gradient_norm`` is the global norm before clipping. ``bubble`` is the share of the devices'
    time without compute, up to the end of the pipeline's drain. ``seconds`` is the time of the
    slowest rank up to there, plus the slowest optimizer step of the step before.

    ``skipped`` means that weights and learning rate did not change: gradients overflowed float16,
    or the step was left out because of ``non_finite``, the place where loss or gradients became NaN
    or infinite. ``loss_scale`` is the factor on the loss (1: no loss scaling).
    ``gradient_noise`` is estimated if `Pipeline` was asked for it. ``metrics`` are the user's
    metrics, computed in training mode before the weights are updated.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    samples: int
    seconds: float
    bubble: float
    skipped: bool = False
    loss_scale: float = 1.0
    gradient_noise: GradientNoise | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    non_finite: str = ""

    @property
    def samples_per_s(self) -> float:
        """Throughput of this step."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


class NoTerms(LossNotFinite):
    """No target of a batch counts in the loss."""


@dataclass(frozen=True, slots=True)
class RankTotals:
    """One rank's numbers at the end of an iteration.

    ``loss_sum`` is the sum of weight times loss over its slices. ``square_sum`` is the sum of
    squares of its gradients before division by the weight. ``fingerprint`` differs between
    different batches. ``variance`` and ``noisy_square`` are this rank's shares of the gradient
    noise (`NoiseMeter.totals`).
    """

    loss_sum: float
    weight: float
    square_sum: float
    busy_s: float
    elapsed_s: float
    optimizer_s: float
    rows: float
    fingerprint: float
    variance: float = 0.0
    noisy_square: float = 0.0

    def values(self) -> list[float]:
        """The values in the order of the fields."""
        return [getattr(self, name) for name in self.__slots__]


@dataclass(frozen=True, slots=True)
class Totals:
    """The combined numbers of all ranks; gradients are those of the unscaled mean loss.

    ``variance`` and ``noisy_square`` are those of `NoiseMeter.totals`; 0 if not measured.
    """

    loss: float
    weight: float
    gradient_norm: float
    seconds: float
    bubble: float
    variance: float = 0.0
    noisy_square: float = 0.0

    @classmethod
    def of(cls, table: list[list[float]], devices: int, seed: float = 1.0) -> "Totals":
        """Combine the `RankTotals.values` of every rank; ``devices`` ranks compute.

        ``seed`` is the factor on the gradients from which the backward started.

        Raises:
            BadInput: the ranks were given different batches.
        """
        ranks = [RankTotals(*row) for row in table]
        check_same_batch(ranks)
        weight = sum(rank.weight for rank in ranks)
        loss = sum(rank.loss_sum for rank in ranks) / weight if weight else float("nan")
        square_sum = sum(rank.square_sum for rank in ranks)
        divisor = weight * seed
        norm = sqrt(square_sum) / divisor if weight and square_sum >= 0 else float("nan")
        noise = (sum(r.variance for r in ranks), sum(r.noisy_square for r in ranks))
        variance, noisy_square = (n / divisor**2 if weight else 0.0 for n in noise)
        elapsed = max(rank.elapsed_s for rank in ranks)
        busy = sum(rank.busy_s for rank in ranks)
        bubble = 1 - busy / (devices * elapsed) if elapsed > 0 else 0.0
        seconds = elapsed + max(rank.optimizer_s for rank in ranks)
        return cls(loss, weight, norm, seconds, bubble, variance, noisy_square)

    def check_finite(self, step: int, learning_rate: float, *, loss_scaled: bool = False) -> None:
        """Raise `LossNotFinite` unless loss and gradients are finite.

        With loss scaling, gradients may overflow, which a smaller scale can repair. It cannot
        repair the loss, which is computed without the scale.
        """
        if self.weight == 0:
            raise NoTerms(
                f"no target of the batch of step {step} counts in the loss (all are ignored), so "
                f"its mean is undefined",
                step,
                "skip such batches",
            )
        what = "loss" if not isfinite(self.loss) else "gradient norm"
        value = self.loss if what == "loss" else self.gradient_norm
        if not isfinite(value) and not (loss_scaled and what == "gradient norm"):
            raise LossNotFinite(
                f"{what} is {value} at step {step} (learning rate {learning_rate:g}), no optimizer "
                f"step was taken",
                step,
                "lower the learning rate, clip the gradients or check the data",
            )


def check_same_batch(ranks: list[RankTotals]) -> None:
    """Raise `BadInput` if two ranks were given different batches."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        # NaN compares unequal to itself, yet is the same.
        same = repr(other.fingerprint) == repr(first.fingerprint)
        if other.rows != first.rows or not same:
            raise BadInput(
                f"rank {rank} was given another batch than rank 0 ({other.rows:.0f} and "
                f"{first.rows:.0f} samples); every rank must iterate the same loader in the same "
                f"order: use no DistributedSampler, and seed the shuffling"
            )


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """The factor that clips gradients of global norm ``norm``, as in `clip_grad_norm_`."""
    if clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))


def fingerprint(leaf: Leaf) -> float:
    """A number that differs between batches, computed from the first values of a leaf.

    A leaf of which ranks hold different rows has its batch's own number.
    """
    if isinstance(leaf, PartialLeaf):
        return leaf.number
    values = leaf.reshape(-1)[:FINGERPRINT_VALUES]
    return float(values.double().sum())
