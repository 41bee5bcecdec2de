"""A training job: the model, its data, and how to train it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import nn

from penstock.capture.batch_layout import RowsOf
from penstock.capture.batch_part import LeafKey
from penstock.capture.layer_graph import SplitTable
from penstock.capture.lengths import Dimensions, Dynamic
from penstock.capture.stage_program import Batch, Loss
from penstock.errors import BadInput
from penstock.plan.plan import MOST_RANKS
from penstock.plan.problem import check_batch, micro_batch_sizes_of
from penstock.runtime.batch_needs import BatchNeeds
from penstock.runtime.callbacks import Callback
from penstock.runtime.conflicts import check_conflicts, uses_of_settings
from penstock.runtime.gradients.loss_scaling import LossScaling
from penstock.runtime.processes.heartbeat import HEARTBEAT
from penstock.runtime.settings import Verification
from penstock.runtime.trackers import check_trackers
from penstock.runtime.user_metrics import Metric
from penstock.runtime.weights.pretrained import Weights
from penstock.schedule.weight_rule import OptimizerSync

__all__ = [
    "RECORDED",
    "Data",
    "Job",
    "OptimizerSettings",
    "Split",
    "TensorSettings",
]

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
"""What a run records for each step, besides metrics."""

LONGEST_NAME = 100
"""Longest job name in characters; a run's directory adds the time, and file names are limited."""

Split: TypeAlias = Literal["train", "held-out"]
"""The two parts of a job's data."""

Data: TypeAlias = Callable[..., Iterator[Batch]]
"""``data(split, seed, start_step, batch_size)`` yields the batches from step ``start_step`` on.

It yields one batch for each step. If a step takes several batches, ``start_step`` counts batches.

A batch must depend only on these four arguments and its step. Then every rank iterates over the
same batches, and a resumed run gets those that an uninterrupted one would have got. The iterator of
``"train"`` is endless, or its end ends the training. That of ``"held-out"`` may end after any
batch.

With another argument ``needs=None`` it is also called with what the rank reads (`BatchNeeds`), and
then may yield a `BatchPart` for each batch. Where ``needs`` is ``None`` it yields whole batches:
for planning, and for a first step that is verified.
"""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Which optimizer to use, and how its learning rate changes over the steps.

    The rate rises linearly to ``learning_rate`` over ``warm_up_steps``. Then ``"cosine"`` lowers it
    to a tenth at the last step, and ``"constant"`` keeps it. ``betas`` are for Adam and AdamW,
    ``momentum`` is for SGD and Muon. ``"muon"`` uses Muon for matrices and AdamW for the rest.
    ``fused`` and ``foreach`` are PyTorch's options: one kernel for all parameters, or one kernel
    for each kind of operation. With neither, parameters are stepped one by one.

    Raises:
        BadInput: both ``fused`` and ``foreach``, or a beta outside [0, 1).
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

        For Muon, that of matrices; biases and norms have two moments but few bytes.
        """
        match self.name:
            case "adamw" | "adam":
                return 2.0
            case "muon":
                return 1.0
            case "sgd":
                return 1.0 if self.momentum else 0.0


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """Which tensor groups a plan may have, and which layers they divide.

    ``ranks`` are the sizes of groups that a planner may choose, beside single ranks. ``layers`` is
    the table of `Pipeline` (None: the model's own ``base_model_tp_plan``). ``given``: the sizes are
    those of a given plan, so the whole model need not be divisible.
    """

    ranks: tuple[int, ...] = ()
    layers: SplitTable | None = None
    given: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether costs on groups are wanted."""
        return bool(self.ranks) or self.layers is not None


@dataclass(frozen=True)
class Job:
    """Everything that ``penstock train`` needs: a model, data, and training settings.

    ``batch_size`` is the global batch in samples; a plan cuts it into micro-batches of one of
    ``micro_batch_sizes`` (empty: every divisor). ``loss`` is None if the model returns its loss.
    ``clip_norm``, ``evaluate_every`` and ``checkpoint_every`` are disabled by 0. ``accumulate`` is
    the number of batches in a step; each is a flush of the pipeline, so a step has
    ``accumulate * batch_size`` samples. ``loss_scaling`` is used only with float16. ``weights`` are
    the first weights, as in `Pipeline`; ``save_weights`` is a directory for the final weights.

    ``compile``, ``metrics``, ``callbacks``, ``verify``, ``optimizer_sync``, ``dynamic`` and
    ``compare_replicas_every`` are those of `Pipeline`. ``dynamic`` may also be ``"auto"``:
    dimensions in which the first batches of the data differ are dynamic. ``rows`` is that of
    `capture_model`. A callback that calls
    ``pipe.stop()`` ends the run after the next step. ``build_model``, ``data``, ``loss``, metrics
    and callbacks must be importable functions, because each worker process imports them.

    ``on_non_finite`` is that of `Pipeline`, or ``"roll-back"``: after a step whose loss or
    gradients are not finite, train again from the last checkpoint, and leave out its batch.
    ``batch_limit_s`` is how long the data may take for a batch (0: no limit). ``trackers`` show a
    run elsewhere (`TRACKERS`). ``tensor_parallel`` lets the plan have groups of ranks that share a
    stage.

    Raises:
        BadInput: a number out of range, or settings that contradict each other.
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
    compile: bool = False
    optimizer_sync: OptimizerSync = "before"
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    callbacks: tuple[Callback, ...] = ()
    trackers: tuple[str, ...] = ()
    verify: Verification = "first-step"
    compare_replicas_every: int = 50
    on_non_finite: Literal["stop", "skip", "roll-back"] = "stop"
    batch_limit_s: float = 600.0
    weights: Weights | None = None
    save_weights: Path | None = None
    tensor_parallel: TensorSettings = TensorSettings()
    dynamic: Dynamic | Literal["auto"] = field(
        default_factory=dict[str | int | tuple[str | int, ...], Dimensions]
    )
    rows: RowsOf = field(default_factory=dict[LeafKey, int])

    def __post_init__(self) -> None:
        check_job(self)
        check_conflicts(self.uses, f"job '{self.name}': ")
        if self.tensor_parallel.ranks:
            sizes = list(self.tensor_parallel.ranks)
            if not all(1 < size <= MOST_RANKS for size in sizes):
                raise BadInput(
                    f"job '{self.name}': tensor_parallel has groups of {sizes} ranks; give numbers "
                    f"from 2 to {MOST_RANKS}"
                )

    @property
    def uses(self) -> dict[str, str]:
        """What the job uses, for `check_conflicts`."""
        settings = vars(self) | {
            "optimizer.name": self.optimizer.name,
            "tensor_parallel.ranks": self.tensor_parallel.ranks,
        }
        return uses_of_settings(settings, toml=True)

    @property
    def reads_parts(self) -> bool:
        """Whether the data can be told what a rank reads."""
        return "needs" in inspect.signature(self.data).parameters

    def batches(
        self, split: Split, start_step: int = 0, needs: BatchNeeds | None = None
    ) -> Iterator[Batch]:
        """One batch for each step from ``start_step`` on; of what a rank ``needs``, if given.

        Data that know no needs yield whole batches in any case. The process ends if a batch has not
        come within ``batch_limit_s``.
        """
        told = {"needs": needs} if self.reads_parts else {}
        ask = partial(self.data, split, self.seed, start_step, self.batch_size, **told)
        what = f"the data of job '{self.name}', split '{split}', from step {start_step + 1}"
        return HEARTBEAT.read(ask, what, self.batch_limit_s)

    def example_batch(self) -> Batch:
        """The first batch of the training data.

        Raises:
            BadInput: the data yields no batch.
        """
        for batch in self.batches("train"):
            return batch
        raise BadInput(
            f"job '{self.name}': data('train', {self.seed}, 0, {self.batch_size}) yields no batch; "
            f"it must yield one for each step"
        )

    def autocast_dtype(self) -> torch.dtype | None:
        """The type of matrix products; None stands for the parameters' own type."""
        return {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.autocast]

    def micro_batch_choices(self) -> tuple[int, ...]:
        """The micro-batch sizes a planner may use, largest first."""
        return self.micro_batch_sizes or micro_batch_sizes_of(self.batch_size)


def is_file_name(name: str) -> bool:
    """Whether a name can be used as the name of a file or directory."""
    is_plain = name.isprintable() and "/" not in name and name not in (".", "..")
    return is_plain and 0 < len(name) <= LONGEST_NAME


def check_job(job: Job) -> None:
    """Raise `BadInput` for settings that are out of range or contradict each other."""
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
        "compare_replicas_every": (job.compare_replicas_every, 0),
        "batch_limit_s": (job.batch_limit_s, 0),
        "optimizer.warm_up_steps": (job.optimizer.warm_up_steps, 0),
        "optimizer.learning_rate": (job.optimizer.learning_rate, 0),
        "optimizer.weight_decay": (job.optimizer.weight_decay, 0),
    }
    for setting, (value, least) in at_least.items():
        if not least <= value < float("inf"):
            raise BadInput(f"job '{job.name}': {setting} is {value}; it must be >= {least}")
    check_batch(job.batch_size)
    check_trackers(job.trackers, f"job '{job.name}'", installed=False)
    for name in job.metrics:
        if name in RECORDED or name.startswith("evaluation_"):
            raise BadInput(
                f"job '{job.name}': a metric is called '{name}', as a column of the run's own "
                f"records is; call it something else"
            )
    for size in job.micro_batch_sizes:
        if size < 1 or job.batch_size % size:
            sizes = micro_batch_sizes_of(job.batch_size)
            raise BadInput(
                f"job '{job.name}': micro-batch size {size} does not divide the batch size "
                f"{job.batch_size}; use one of {list(sizes[::-1][:12])}"
            )
