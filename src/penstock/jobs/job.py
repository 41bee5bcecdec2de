"""A training job: the model, its data, and how to train it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import nn

from penstock.capture.layer_graph import Batch, Loss
from penstock.capture.lengths import Dimensions, Dynamic
from penstock.errors import BadInput
from penstock.runtime.callbacks import Callback
from penstock.runtime.gradients.loss_scaling import LossScaling
from penstock.runtime.pipeline import Verification
from penstock.runtime.user_metrics import Metric
from penstock.runtime.weights.pretrained import Weights
from penstock.schedule.weight_rule import OptimizerSync

__all__ = ["RECORDED", "Data", "Job", "OptimizerSettings", "Split"]

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
    "gradient_noise_scale",
    "verified",
    "lengths",
)
"""What a run records of each step besides metrics."""

LONGEST_NAME = 100
"""Characters of a job's name: a run's directory adds the time, and file systems have limits."""

Split: TypeAlias = Literal["train", "held-out"]
"""The two parts of a job's data."""

Data: TypeAlias = Callable[[Split, int, int, int], Iterator[Batch]]
"""``data(split, seed, start_step, batch_size)``: one batch for each step from ``start_step`` on.

Where a step takes several batches, ``start_step`` counts batches.

The batch of a step depends on these four only, so that every rank iterates the same batches and a
resumed run sees those that an uninterrupted one would have seen. The iterator of ``"train"`` is
endless, or ends the training; that of ``"held-out"`` may end after any batch.
"""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Which optimizer, and how its learning rate goes over the steps.

    The rate rises linearly over ``warm_up_steps`` to ``learning_rate``; ``"cosine"`` then lowers
    it to a tenth at the last step, ``"constant"`` keeps it. ``betas`` are those of Adam and AdamW,
    ``momentum`` is that of SGD and Muon. ``"muon"`` is Muon for matrices and AdamW for the rest.
    ``fused`` and ``foreach`` are torch's own options: one kernel for all parameters, or one for
    each kind of operation; with neither, parameters are stepped one by one.

    Raises:
        BadInput: both ways to step at once, or a beta outside [0, 1).
    """

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9
    schedule: Literal["cosine", "constant"] = "cosine"
    warm_up_steps: int = 10
    fused: bool = True
    foreach: bool = False

    def __post_init__(self) -> None:
        if self.fused and self.foreach:
            raise BadInput(
                "the optimizer is to be both fused and foreach; set one of them, or fused = false"
            )
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise BadInput(f"betas are {list(self.betas)}; each must be in [0, 1)")

    @property
    def state_bytes_per_parameter_byte(self) -> float:
        """Bytes of optimizer state for each byte of parameters: two moments, one, or none.

        Muon's is that of matrices; biases and norms have two moments, but few bytes.
        """
        match self.name:
            case "adamw" | "adam":
                return 2.0
            case "muon":
                return 1.0
            case "sgd":
                return 1.0 if self.momentum else 0.0


@dataclass(frozen=True)
class Job:
    """Everything ``penstock train`` needs: a model, batches of data, and training settings.

    ``batch_size`` is the global batch in samples; a plan cuts it into micro-batches of one of
    ``micro_batch_sizes`` (empty: every divisor). ``loss`` is absent where the model returns its
    loss itself. ``clip_norm``, ``evaluate_every`` and ``checkpoint_every`` are off at 0.
    ``accumulate`` is the number of batches that a step takes, each a flush of the pipeline, so that
    a step has ``accumulate * batch_size`` samples. ``loss_scaling`` counts with float16 only.
    ``weights`` are first weights, `Pipeline`'s; ``save_weights`` is a directory for the last ones.
    ``compile``, ``metrics``, ``callbacks``, ``verify``, ``optimizer_sync`` and ``dynamic`` are
    those of `Pipeline`; ``dynamic`` may be ``"auto"``: what differs between the first batches of
    the data varies. A callback that calls ``pipe.stop()`` ends the run after the next step.
    ``build_model``, ``data``, ``loss``, metrics and callbacks must be importable functions, because
    each worker process imports them anew.

    Raises:
        BadInput: a count or rate outside its range.
    """

    name: str
    build_model: Callable[[], nn.Module]
    data: Data
    loss: Loss | None = None
    batch_size: int = 16
    micro_batch_sizes: tuple[int, ...] = ()
    steps: int = 100
    seed: int = 0
    optimizer: OptimizerSettings = OptimizerSettings()
    clip_norm: float = 1.0
    evaluate_every: int = 50
    evaluation_batches: int = 2
    checkpoint_every: int = 100
    autocast: Literal["off", "bfloat16", "float16"] = "off"
    granularity: Literal["block", "module", "operator"] = "module"
    accumulate: int = 1
    shard_optimizer: bool = False
    gradient_noise: bool = False
    compile: bool = False
    optimizer_sync: OptimizerSync = "before"
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    callbacks: tuple[Callback, ...] = ()
    verify: Verification = "first-step"
    weights: Weights | None = None
    save_weights: Path | None = None
    dynamic: Dynamic | Literal["auto"] = field(
        default_factory=dict[str | int | tuple[str | int, ...], Dimensions]
    )

    def __post_init__(self) -> None:
        check_job(self)

    def batches(self, split: Split, start_step: int = 0) -> Iterator[Batch]:
        """One batch for each step from ``start_step`` on."""
        return self.data(split, self.seed, start_step, self.batch_size)

    def example_batch(self) -> Batch:
        """The first batch of the training data.

        Raises:
            BadInput: there is none.
        """
        for batch in self.batches("train"):
            return batch
        raise BadInput(
            f"job '{self.name}': data('train', {self.seed}, 0, {self.batch_size}) yields no batch; "
            f"it must yield one for each step"
        )

    def autocast_dtype(self) -> torch.dtype | None:
        """The type that matrix products are computed in, or none for that of the parameters."""
        return {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.autocast]

    def micro_batch_choices(self) -> tuple[int, ...]:
        """The micro-batch sizes a planner may use, largest first."""
        divisors = (n for n in range(self.batch_size, 0, -1) if self.batch_size % n == 0)
        return self.micro_batch_sizes or tuple(divisors)


def is_file_name(name: str) -> bool:
    """Whether a name stays in the directory that it is put in."""
    is_plain = name.isprintable() and "/" not in name and name not in (".", "..")
    return is_plain and 0 < len(name) <= LONGEST_NAME


def check_job(job: Job) -> None:
    """Raise `BadInput` for settings that no training could follow."""
    if not is_file_name(job.name):
        raise BadInput(
            f"job name {job.name[:LONGEST_NAME]!r} cannot name a directory; use 1 to "
            f"{LONGEST_NAME} printable characters without '/', and not '.' or '..'"
        )
    at_least = {
        "batch_size": (job.batch_size, 1),
        "steps": (job.steps, 1),
        "seed": (job.seed, 0),
        "clip_norm": (job.clip_norm, 0),
        "accumulate": (job.accumulate, 1),
        "evaluate_every": (job.evaluate_every, 0),
        "evaluation_batches": (job.evaluation_batches, 1),
        "checkpoint_every": (job.checkpoint_every, 0),
        "optimizer.warm_up_steps": (job.optimizer.warm_up_steps, 0),
        "optimizer.learning_rate": (job.optimizer.learning_rate, 0),
        "optimizer.weight_decay": (job.optimizer.weight_decay, 0),
    }
    for setting, (value, least) in at_least.items():
        if not least <= value < float("inf"):
            raise BadInput(f"job '{job.name}': {setting} is {value}; it must be >= {least}")
    if job.optimizer_sync == "after" and job.accumulate > 1:
        raise BadInput(
            f"job '{job.name}': optimizer_sync is \"after\", and steps take {job.accumulate} "
            f"batches; set accumulate = 1, or leave optimizer_sync out"
        )
    for name in job.metrics:
        if name in RECORDED or name.startswith("evaluation_"):
            raise BadInput(
                f"job '{job.name}': a metric is called '{name}', as a column of the run's own "
                f"records is; call it something else"
            )
    for size in job.micro_batch_sizes:
        if size < 1 or job.batch_size % size:
            divisors = [n for n in range(1, job.batch_size + 1) if job.batch_size % n == 0]
            raise BadInput(
                f"job '{job.name}': micro-batch size {size} does not divide the batch size "
                f"{job.batch_size}; use one of {divisors[:12]}"
            )
