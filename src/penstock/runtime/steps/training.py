"""What changes the weights on one rank: optimizer and learning-rate schedule, and their state.

Loss scaling and the running averages of the gradient's noise belong to that state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.runtime.gradients.buckets import GradientBuckets
from penstock.runtime.gradients.loss_scaling import LossScaler, LossScaling
from penstock.runtime.gradients.noise import GradientNoise, NoiseAverage
from penstock.runtime.metrics import Totals, clip_factor
from penstock.runtime.steps.optimizer_state import (
    ParameterGroup,
    group_settings,
    optimizer_entries,
    optimizer_tensors,
    restore_optimizer,
)

__all__ = [
    "MakeOptimizer",
    "MakeSchedule",
    "Training",
    "Update",
    "mean_factor",
    "merged_states",
]

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]
MakeSchedule: TypeAlias = Callable[[Optimizer], LRScheduler | None]


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one step's gradients, with the rate and the scale that it was taken with."""

    learning_rate: float
    loss_scale: float
    skipped: bool
    noise: GradientNoise | None


class Training:
    """The optimizer of this rank's parameters, its schedule, and the steps taken.

    ``parameters``, by their first names in the model, are those that this rank steps. Without
    ``optimizer`` steps are only counted. ``steps`` are batches: those whose optimizer step was
    skipped, because gradients overflowed, count as well, so that a resumed run goes on with the
    right batch; the learning-rate schedule counts only those that were taken.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        optimizer: MakeOptimizer | None,
        schedule: MakeSchedule | None,
        *,
        clip_norm: float | None = None,
        loss_scaling: LossScaling | None = None,
    ) -> None:
        self.steps = 0
        self.noise = NoiseAverage()
        self.scaler = LossScaler(loss_scaling) if loss_scaling is not None else None
        self._clip_norm = clip_norm
        self.names: dict[torch.Tensor, str] = {p: name for name, p in parameters}
        # A stage without parameters must follow the learning-rate schedule all the same.
        own = [p for _, p in parameters] or [nn.Parameter(torch.zeros(0, device=device))]
        self.optimizer = optimizer(own) if optimizer is not None else None
        self.schedule = None
        if schedule is not None and self.optimizer is not None:
            self.schedule = schedule(self.optimizer)

    @property
    def learning_rate(self) -> float:
        """That of the optimizer's first group, for the next step; 0 without an optimizer."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else 0.0

    def seed(self, samples: int) -> float:
        """What the loss of a step of ``samples`` samples is multiplied by."""
        return self.scaler.seed(samples) if self.scaler is not None else 1.0

    def update(self, totals: Totals, seed: float, samples: int, buckets: GradientBuckets) -> Update:
        """Clip, change the weights, then the learning rate; or skip that after an overflow.

        ``buckets`` hold the gradients, summed and multiplied by ``seed``.

        Raises:
            LossNotFinite: the loss, or a gradient that no loss scale can mend, is not finite.
        """
        update = self.judge(totals, samples, self.learning_rate)
        if not update.skipped:
            buckets.scale(mean_factor(totals.weight, seed))
            self.step(buckets, self.clip_factor(totals))
        return update

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped where their norm is large."""
        return self._clip_norm is not None

    def judge(self, totals: Totals, samples: int, rate: float) -> Update:
        """Count a step at a learning rate, and learn from its numbers whether to take it.

        Changes no weights.

        Raises:
            LossNotFinite: as `update`.
        """
        scaler = self.scaler
        totals.check_finite(self.steps + 1, rate, loss_scaled=scaler is not None)
        scale = scaler.scale if scaler is not None else 1.0
        overflow = not isfinite(totals.gradient_norm)
        if scaler is not None:
            scaler.update(overflow, totals.weight, self.steps + 1)
        self.steps += 1
        noise = None
        if totals.noisy_square > 0 and not overflow:
            noise = self.noise.add(totals.variance, totals.noisy_square, samples)
        return Update(rate, scale, overflow, noise)

    def clip_factor(self, totals: Totals) -> float:
        """What clipping multiplies the gradients of the mean loss with."""
        return clip_factor(totals.gradient_norm, self._clip_norm)

    def step(self, buckets: GradientBuckets | None, factor: float = 1.0) -> None:
        """Multiply the gradients with ``factor`` and change weights, then the learning rate."""
        if buckets is not None:
            buckets.scale(factor)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors, by name."""
        return optimizer_tensors(self.optimizer, self.names) if self.optimizer is not None else {}

    def state(self) -> dict[str, Any]:
        """All else, as JSON can hold it."""
        optimizer = self.optimizer
        groups = group_settings(optimizer, self.names) if optimizer is not None else []
        return {
            "steps": self.steps,
            "groups": [asdict(group) for group in groups],
            "entries": optimizer_entries(optimizer, self.names) if optimizer is not None else {},
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "loss_scaling": self.scaler.state() if self.scaler is not None else None,
            "gradient_noise": self.noise.state(),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Take back what `tensors` and `state` gave, on this rank or merged over all."""
        if self.optimizer is not None:
            groups = [ParameterGroup(**group) for group in state["groups"]]
            restore_optimizer(self.optimizer, self.names, tensors, state["entries"], groups)
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        # Checkpoints of earlier versions, and of runs without them, lack these.
        if self.scaler is not None and state.get("loss_scaling"):
            self.scaler.restore(state["loss_scaling"])
        if state.get("gradient_noise"):
            self.noise.restore(state["gradient_noise"])
        self.steps = state["steps"]


def mean_factor(weight: float, seed: float) -> float:
    """What turns summed gradients into those of the mean loss of ``weight`` terms, not scaled."""
    return 1.0 / weight / seed


def merged_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one, from which each can find its own under any plan."""
    return {
        **states[0],
        "groups": [group for state in states for group in state["groups"]],
        "entries": {name: e for state in states for name, e in state["entries"].items()},
    }
