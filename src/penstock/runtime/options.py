"""Options of a pipeline, checked before anything is built.

`Pipeline` takes what is used often as arguments, and the rest in two groups. All that is made for
it reads one `Options`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import BadInput
from penstock.plan.plan import StateOn
from penstock.runtime.conflicts import uses_of_settings
from penstock.runtime.gradients.loss_scaling import loss_scaling_for
from penstock.runtime.processes.heartbeat import LIMIT_S
from penstock.runtime.tables import LossScaling, Weights
from penstock.runtime.transport.transport import TransportChoice
from penstock.runtime.user_metrics import Metric, check_metrics

MakeOptimizer: TypeAlias = Callable[[Any], Optimizer]
"""Factory of the optimizer of a list of parameters; of pairs with their names, if its argument is
called ``named``.
"""
MakeSchedule: TypeAlias = Callable[[Optimizer], LRScheduler | None]

Verification: TypeAlias = Literal["first-step", "off"]
"""Time of the comparison of training with the whole model."""

Follows: TypeAlias = Literal["loss", "evaluation"]
"""The metric that a schedule such as ReduceLROnPlateau follows."""

OnNonFinite: TypeAlias = Literal["stop", "skip"]
"""Reaction to a step with NaN or infinity: raise an error, or leave it out on all ranks."""


def check_choice(name: str, choice: str, allowed: Sequence[str]) -> None:
    """Raise `BadInput` for a choice that is not allowed."""
    if choice not in allowed:
        words = " or ".join(f'"{each}"' for each in allowed)
        raise BadInput(f'{name} is "{choice}"; it must be {words}')


def check_intervals(of: str, **intervals: int) -> None:
    """Raise `BadInput` for an interval below 0."""
    for name, every in intervals.items():
        if every < 0:
            raise BadInput(f"{name} is {every}; it must be a number of {of}, or 0 for never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Initial weights, and options of their update: an argument of `Pipeline`.

    ``weights`` is a directory of safetensors, or `Weights`; every rank reads its own stages from
    it. Without it they are the model's. ``seed`` is used for weights of a model on the meta device,
    and for dropout. ``loss_scaling`` is used with ``autocast=torch.float16``. With
    ``gradient_dtype=torch.float32`` the gradients of bfloat16 weights are summed in float32, over
    micro-batches and replicas; the optimizer gets each sum rounded once (None: in the weights'
    type).

    With ``on_non_finite="skip"`` a step whose loss or gradients are NaN or infinite is left out on
    all ranks, without an error. ``prediction_error_every``: under a schedule that predicts weights,
    measure the error of the prediction every that many updates (0: never).

    With ``state_on="host"`` the optimizer of a GPU's parameters has its state in host memory and
    steps there, whichever optimizer it is: the GPU then has neither, and a step takes longer. A
    plan can request it, too.

    A learning-rate schedule whose ``step`` needs a metric, as torch's ``ReduceLROnPlateau`` does,
    follows the loss of every step; with ``schedule_follows="evaluation"`` it follows what is given
    to `Pipeline.step_schedule`.

    With ``meet_every`` the replicas of all stages are pipelines side by side: each trains alone on
    its rows of every batch, and its weights meet the others' every ``meet_every`` steps (0:
    gradients are summed in every step). Then all continue from the mean of their weights, or, as in
    DiLoCo, from an outer step with ``outer_learning_rate`` and ``outer_momentum`` (Nesterov's; the
    paper has 0.7 and 0.9).

    Raises:
        BadInput: a value that is not one of those above.
    """

    weights: Weights | Path | str | None = None
    seed: int = 0
    loss_scaling: LossScaling | None = None
    gradient_dtype: torch.dtype | None = None
    on_non_finite: OnNonFinite = "stop"
    prediction_error_every: int = 0
    schedule_follows: Follows = "loss"
    state_on: StateOn = "device"
    meet_every: int = 0
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        check_choice("on_non_finite", self.on_non_finite, get_args(OnNonFinite))
        check_choice("schedule_follows", self.schedule_follows, get_args(Follows))
        check_choice("state_on", self.state_on, get_args(StateOn))
        if self.gradient_dtype not in (None, torch.float32):
            raise BadInput(
                f"gradient_dtype is {self.gradient_dtype}; it must be torch.float32, or None for "
                f"the type of the weights"
            )
        check_intervals("updates", prediction_error_every=self.prediction_error_every)
        check_intervals("steps", meet_every=self.meet_every)
        if not 0 < self.outer_learning_rate < inf:
            raise BadInput(f"outer_learning_rate is {self.outer_learning_rate}; it must be > 0")
        if not 0 <= self.outer_momentum < 1:
            raise BadInput(f"outer_momentum is {self.outer_momentum}; it must be >= 0 and below 1")
        if not self.meet_every and (self.outer_learning_rate, self.outer_momentum) != (1, 0):
            raise BadInput(
                "outer_learning_rate and outer_momentum are those of the step in which pipelines "
                "meet; set meet_every to a number of steps, or leave them out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """Checks that are repeated during training, and the transport: an argument of `Pipeline`.

    Every ``verify_every``-th step is compared with the whole model, as the first one is. In every
    ``check_every``-th step each stage compares its calls with those of the example: code that takes
    another path ends the run in a line. The copies of weights are compared every
    ``compare_replicas_every`` steps. 0 is never.

    With ``check_loss`` the loss of steps 1, 2, 4, 8 and so on, and of the first step of each kind
    of batch, is compared with the user's own loss code: it runs again, without gradients, on
    what the modules gave for the whole step. A step that differs is not taken.

    ``transport`` carries activations: ``"auto"`` is ``"shared-memory"`` between CPU ranks
    of one host and ``"process-groups"``, which work everywhere, elsewhere. With ``"in-process"``
    this process holds all stages of a plan for any devices, for experiments and under a debugger;
    replicas of a stage are then one.

    With ``idle_ranks`` a plan that is given may leave ranks without work, as one that `Pipeline`
    finds may.

    Raises:
        BadInput: an interval below 0, or an unknown transport.
    """

    verify_every: int = 0
    check_every: int = 0
    compare_replicas_every: int = 50
    check_loss: bool = True
    transport: TransportChoice = "auto"
    idle_ranks: bool = False

    def __post_init__(self) -> None:
        check_choice("transport", self.transport, get_args(TransportChoice))
        check_intervals(
            "steps",
            verify_every=self.verify_every,
            check_every=self.check_every,
            compare_replicas_every=self.compare_replicas_every,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `Pipeline` that are not about the model, its plan or its batches.

    They are explained there.
    """

    optimizer: MakeOptimizer | None = None
    learning_rate_schedule: MakeSchedule | None = None
    clip_norm: float | None = None
    shard_optimizer: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    autocast: torch.dtype | None = None
    device: torch.device | str | None = None
    timeout_s: float = LIMIT_S
    verify: Verification = "first-step"
    update: Update = Update()
    safety: Safety = Safety()

    def __post_init__(self) -> None:
        check_choice("verify", self.verify, get_args(Verification))
        if isinstance(self.optimizer, Optimizer):
            kind = type(self.optimizer).__name__
            name = f"torch.optim.{kind}" if hasattr(torch.optim, kind) else kind
            raise BadInput(
                f"optimizer is an {kind} of parameters that ranks do not all hold; give a function "
                f"that makes one of each rank's own: optimizer=lambda p: {name}(p, ...)"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadInput(
                f"clip_norm is {self.clip_norm}; it must be > 0, or None for no clipping"
            )
        if not self.timeout_s > 0:
            raise BadInput(f"timeout_s is {self.timeout_s}; it must be > 0")
        check_metrics(self.metrics)
        _ = self.loss_scaling

    @property
    def loss_scaling(self) -> LossScaling | None:
        """Scaling of the loss in float16; None in other types."""
        return loss_scaling_for(self.autocast, self.update.loss_scaling)

    @property
    def uses(self) -> dict[str, str]:
        """The uses of these options, for `check_conflicts`."""
        parts = (self, self.update, self.safety)
        own = {known.name: getattr(part, known.name) for part in parts for known in fields(part)}
        constrained = {
            "constraints.sharding": "optimizer" * self.shard_optimizer,
            "constraints.state_on": self.update.state_on,
        }
        return uses_of_settings(own | constrained)
