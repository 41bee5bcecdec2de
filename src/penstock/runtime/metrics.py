"""The result of a training step, and the numbers that all ranks exchange for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import isfinite, sqrt
from typing import Any, TypeAlias, TypeVar

import torch

from penstock.capture.batch.part import Leaf, PartialLeaf
from penstock.capture.record.elsewhere import StateLoads, check_loads
from penstock.errors import BadInput, LossNotFinite
from penstock.runtime.clock import StepClock
from penstock.runtime.gradients.buckets import GradientBuckets
from penstock.runtime.stage.runner import LossTerm
from penstock.runtime.transport.transport import Transport, announced
from penstock.runtime.user_metrics import Evaluation, Means, MetricSums

FINGERPRINT_VALUES = 1024
SPREAD = 2_654_435_761
"""A prime; its multiples modulo a leaf's size repeat no place, and fall into no row's rhythm."""


Number: TypeAlias = torch.Tensor | float
"""On a device, or on the host."""

Norm = TypeVar("Norm", float, torch.Tensor)


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
    ``metrics`` are the user's metrics, computed in training mode before the weights are updated.
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
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    non_finite: str = ""

    @property
    def samples_per_s(self) -> float:
        """Throughput of this step."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


class NoTerms(LossNotFinite):
    """No target of a batch counts in the loss."""


class LossPathChanged(BadInput):
    """The loss of a step took another path than recorded; the step must be undone.

    ``where`` says how, on the ranks that have seen it.
    """

    def __init__(self, rank: int, where: str) -> None:
        super().__init__(
            f"the loss took another path than was recorded, as rank {rank} saw"
            f"{': ' * bool(where)}{where}; make a new Pipeline, with such a batch and loss"
        )
        self.where = where


@dataclass(frozen=True, slots=True)
class RankTotals:
    """One rank's numbers at the end of an iteration.

    ``loss_sum`` is the sum of weight times loss over its slices. ``square_sum`` is the sum of
    squares of its gradients before division by the weight. ``fingerprint`` differs between
    different batches. ``wants_stop`` is the reason to stop, ``other_path`` whether the loss took
    another path than recorded, ``loaded`` is `StateLoads.taken`.
    """

    loss_sum: float
    weight: float
    square_sum: float
    busy_s: float
    elapsed_s: float
    optimizer_s: float
    rows: float
    fingerprint: float
    wants_stop: float
    other_path: float
    loaded: float


@dataclass(frozen=True, slots=True)
class Totals:
    """The combined numbers of all ranks; gradients are those of the unscaled mean loss.

    ``means`` are those of the user's metrics. ``pipelines`` are the numbers of each pipeline, where
    several train alone; the norm is then the largest of theirs.
    """

    loss: float
    weight: float
    gradient_norm: float
    seconds: float
    bubble: float
    means: Means = field(default_factory=dict[str, tuple[float, float]])
    pipelines: tuple["Totals", ...] = ()

    def of_pipeline(self, number: int) -> "Totals":
        """The numbers by which a pipeline takes its step: its own, where several train alone.

        They are those of the first with bad numbers, if there is one: then none takes the step, so
        that the learning rates of all stay equal.
        """
        bad = (t for t in self.pipelines if not (isfinite(t.loss) and isfinite(t.gradient_norm)))
        return next(bad, self.pipelines[number] if self.pipelines else self)

    @classmethod
    def of(cls, ranks: Sequence[RankTotals], devices: int, seed: float = 1.0) -> "Totals":
        """Combine the numbers of every rank; ``devices`` ranks compute.

        ``seed`` is the factor on the gradients from which the backward started.
        """
        check_same_batch(ranks)
        weight = sum(rank.weight for rank in ranks)
        loss = sum(rank.loss_sum for rank in ranks) / weight if weight else float("nan")
        square_sum = sum(rank.square_sum for rank in ranks)
        divisor = weight * seed
        norm = sqrt(square_sum) / divisor if weight and square_sum >= 0 else float("nan")
        elapsed = max(rank.elapsed_s for rank in ranks)
        busy = sum(rank.busy_s for rank in ranks)
        bubble = 1 - busy / (devices * elapsed) if elapsed > 0 else 0.0
        seconds = elapsed + max(rank.optimizer_s for rank in ranks)
        return cls(loss, weight, norm, seconds, bubble)

    def check_finite(self, step: int, learning_rate: float, *, loss_scaled: bool = False) -> None:
        """Raise `LossNotFinite` unless loss and gradients are finite.

        With loss scaling, gradients may overflow, which a smaller scale can repair. It cannot
        repair the loss, which is computed without the scale.
        """
        if self.weight == 0:
            raise NoTerms(
                f"no target of the batch of step {step} counts in the loss (all are ignored), so "
                f"its mean is undefined",
                "skip such batches",
                step,
            )
        what = "loss" if not isfinite(self.loss) else "gradient norm"
        value = self.loss if what == "loss" else self.gradient_norm
        if not isfinite(value) and not (loss_scaled and what == "gradient norm"):
            raise LossNotFinite(
                f"{what} is {value} at step {step} (learning rate {learning_rate:g}), no optimizer "
                f"step was taken",
                "lower the learning rate, clip the gradients or check the data",
                step,
            )


PAUSE, END = 1, 2
"""Reasons why the ranks stop: to continue later, or because the training is over."""

COUNT = len(fields(RankTotals))


class RankNumbers:
    """This rank's numbers, and the combined numbers of all ranks.

    ``wants_stop`` is the reason of this rank's request that all stop, or 0. ``stopping`` is the
    largest such reason of all ranks by the latest exchange. ``optimizer_s`` is the duration of its
    latest optimizer step. All ranks of a tensor group have equal loss terms, of which those of one
    rank count (``counts``). ``pipelines`` are the ranks of each, where several train alone.
    ``other_path`` says how the loss took another path on this rank, if it did.
    """

    def __init__(
        self,
        transport: Transport | None,
        clock: StepClock,
        devices: int,
        *,
        counts: bool = True,
        pipelines: Sequence[Sequence[int]] = (),
        other_path: Callable[[], str] = lambda: "",
        loads: StateLoads | None = None,
    ) -> None:
        self.other_path, self._loads = other_path, loads
        self.wants_stop = self.stopping = 0
        self.optimizer_s = 0.0
        self._transport, self._clock = transport, clock
        self._devices, self._counts, self._pipelines = devices, counts, pipelines

    def own(
        self,
        batches: Sequence[Sequence[Leaf]],
        terms: Sequence[LossTerm],
        buckets: GradientBuckets | None,
        metrics: MetricSums | None,
        *,
        summed: bool = True,
    ) -> list[float]:
        """This rank's `RankTotals` of an iteration, then metrics'; ``buckets`` are for training.

        Their gradients are ``summed`` over their holders, or this rank's alone.
        """
        self._clock.settle()
        loss_sum: Number = 0.0
        weight: Number = 0.0
        if terms and self._counts:
            losses = torch.stack([term.loss for term in terms]).double()
            weights = torch.stack([term.weight for term in terms]).to(losses)
            weight = weights.sum()
            loss_sum = torch.where(weights > 0, losses * weights, 0.0).sum()
        square = buckets.square_sum(summed=summed) if buckets is not None else 0.0
        prints = [n * fingerprint(x) for n, leaves in enumerate(batches, 1) for x in leaves]
        loss_sum, weight, square, *prints = on_the_host([loss_sum, weight, square, *prints])
        return [
            loss_sum,
            weight,
            square,
            self._clock.busy_s,
            self._clock.now() - self._clock.start_s,
            self.optimizer_s,
            float(sum(leaves[0].shape[0] for leaves in batches)),
            sum(prints),
            float(self.wants_stop),
            float(bool(self.other_path())),
            self._loads.taken() if self._loads is not None else 0.0,
            *(metrics.totals() if metrics is not None else ()),
        ]

    def put_together(
        self,
        rows: Sequence[list[float]],
        metrics: MetricSums | None,
        seed: float = 1.0,
        *,
        summed: bool = True,
    ) -> Totals:
        """The totals of an iteration, from the numbers of every rank.

        Gradients are ``summed`` over all ranks, or within pipelines only.
        """
        ranks = [RankTotals(*row[:COUNT]) for row in rows]
        differing = [rank for rank, own in enumerate(ranks) if own.other_path]
        if differing:
            raise LossPathChanged(differing[0], self.other_path())
        check_loads([own.loaded for own in ranks])
        totals = Totals.of(ranks, self._devices, seed)
        if not summed:
            alone = [
                Totals.of([ranks[rank] for rank in pipeline], len(pipeline), seed)
                for pipeline in self._pipelines
            ]
            norm = max((each.gradient_norm for each in alone), default=totals.gradient_norm)
            totals = replace(totals, gradient_norm=norm, pipelines=tuple(alone))
        self.stopping = int(max(own.wants_stop for own in ranks))
        if metrics is None:
            return totals
        return replace(totals, means=metrics.combined([row[COUNT:] for row in rows]))

    def exchange(self, values: list[float], what: str) -> list[list[float]]:
        """Exchange numbers: returns those of every rank, by rank."""
        return self.announce(values, what)()

    def announce(self, values: list[float], what: str) -> Callable[[], list[list[float]]]:
        """Send numbers of this rank. The returned function waits for those of all, by rank.

        Every rank must call it before the next `announce`.
        """
        return announced(self._transport, values, what)


def check_same_batch(ranks: Sequence[RankTotals]) -> None:
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


def on_the_host(numbers: Sequence[Number]) -> list[float]:
    """The values of numbers; those on one device are read at once, since the host waits for it."""
    found = [0.0 if isinstance(number, torch.Tensor) else number for number in numbers]
    tensors = {n: t for n, t in enumerate(numbers) if isinstance(t, torch.Tensor)}
    for device in {tensor.device for tensor in tensors.values()}:
        places = [place for place, tensor in tensors.items() if tensor.device == device]
        values = torch.stack([tensors[place].double() for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            found[place] = value
    return found


def clip_factor(norm: Norm, clip_norm: float) -> Norm:
    """The factor that clips gradients of global norm ``norm``, as in `clip_grad_norm_`."""
    limit = clip_norm / (norm + 1e-6)
    return limit.clamp(max=1.0) if isinstance(limit, torch.Tensor) else min(1.0, limit)


def fingerprint(leaf: Leaf) -> Number:
    """A number that differs between batches, computed from values all over a leaf.

    Each counts by its place, so that samples in another order give another number. A leaf of which
    ranks hold different rows has its batch's own number.
    """
    if isinstance(leaf, PartialLeaf):
        return leaf.number
    places, weights = places_in(leaf.numel(), leaf.device)
    return (leaf.reshape(-1)[places].double() * weights).sum()


@lru_cache(maxsize=64)
def places_in(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Places spread over a leaf of ``size`` values, at most `FINGERPRINT_VALUES`; their weights."""
    numbers = torch.arange(min(size, FINGERPRINT_VALUES), device=device)
    return numbers * SPREAD % max(size, 1), numbers.double() + 1


RECORDED = (
    "step",
    "loss",
    "samples_per_s",
    "iteration_s",
    "bubble",
    "gradient_norm",
    "learning_rate",
    "skipped",
    "loss_scale",
    "non_finite",
    "verified",
    "lengths",
)
"""Values that a run records for each step, besides metrics."""

NO_NUMBERS = ("step", "verified", "lengths", "non_finite")
"""Entries of a row that are not numbers over the steps."""


def step_row(metrics: StepMetrics) -> dict[str, Any]:
    """The record of a step."""
    row: dict[str, Any] = {
        "step": metrics.step,
        "loss": metrics.loss,
        "samples_per_s": metrics.samples_per_s,
        "iteration_s": metrics.seconds,
        "bubble": metrics.bubble,
        "gradient_norm": metrics.gradient_norm,
        "learning_rate": metrics.learning_rate,
        **metrics.metrics,
    }
    if metrics.skipped:
        row |= {"skipped": 1, "gradient_norm": None}
    if metrics.non_finite:
        # JSON has no NaN, and loss, norm and metrics of such a step say nothing.
        row = {"step": metrics.step, "skipped": 1, "non_finite": metrics.non_finite}
    if metrics.loss_scale != 1.0:
        row["loss_scale"] = metrics.loss_scale
    return row


def evaluation_row(step: int, evaluation: Evaluation) -> dict[str, Any]:
    """The record of an evaluation after ``step`` steps."""
    metrics = {f"evaluation_{name}": value for name, value in evaluation.metrics.items()}
    return {"step": step, "evaluation_loss": evaluation.loss, **metrics}


def numbers_in(row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row that can be drawn over the steps."""
    return {
        name: value for name, value in row.items() if name not in NO_NUMBERS and value is not None
    }
