"""A training job: the model, its data, and how to train it."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
)
from pydantic.dataclasses import dataclass

from penstock.capture.batch.lengths import Dimensions, Dynamic, Length
from penstock.errors import BadInput
from penstock.files import Table
from penstock.plan.plan import MOST_RANKS
from penstock.plan.problem import check_batch, micro_batch_sizes_of
from penstock.planners.problem import member_named, schedules_named
from penstock.planners.search.search import PLANNERS
from penstock.runtime.conflicts import check_conflicts, uses_of_settings
from penstock.runtime.processes.heartbeat import HEARTBEAT
from penstock.runtime.tables import Constraints, LossScaling, Weights

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from penstock.capture.batch.part import LeafKey
    from penstock.capture.contract import Batch, Loss
    from penstock.runtime.batch_needs import BatchNeeds
    from penstock.runtime.callbacks import Callback
    from penstock.runtime.options import Update
    from penstock.runtime.update.average import ExponentialAverage
    from penstock.runtime.user_metrics import Metric
else:  # a job file is checked before torch is loaded
    Batch = Callback = Loss = Metric = Module = Any
    LeafKey = str | int | tuple[str | int, ...]

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


CHECKED = ConfigDict(strict=True, arbitrary_types_allowed=True)

Count = Annotated[int, Field(ge=1)]
Interval = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = Annotated[tuple[Count, ...], Field(strict=False)]  # TOML has lists
Beta = Annotated[float, Field(ge=0, lt=1)]
GroupSize = Annotated[int, Field(ge=2, le=MOST_RANKS)]


MALFORMED = 'write it as "module:function", for example "my_model:build"'

OPTIMIZERS = ("adamw", "adam", "sgd", "muon")
"""The optimizers that have keys of their own in a job."""


def member_at(place: str) -> Any:
    """The object in a module that is named as ``module:name``."""
    module_name, colon, name = place.partition(":")
    if not (module_name and colon and name):
        raise ValueError(MALFORMED)
    if module_name.startswith("."):
        raise ValueError(
            "a job file belongs to no package, so '.' means nothing; write the module's whole name"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"importing '{module_name}' failed: {error}; put the module beside the job file or "
            f"install it"
        ) from error
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ValueError(
            f"importing '{module_name}' ended with {kind}: {error}; a module of a job only "
            f"defines, it runs nothing while it is imported"
        ) from error
    if not hasattr(module, name):
        near = get_close_matches(name, dir(module), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"define it in {module.__file__}"
        raise ValueError(f"'{module_name}' has no function '{name}'; {hint}")
    return getattr(module, name)


def optimizer_name(name: str) -> str:
    """The name of an optimizer, or the place of a class; raises ValueError for any other text."""
    if name in OPTIMIZERS:
        return name
    if ":" not in name:
        near = get_close_matches(name.lower(), OPTIMIZERS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(OPTIMIZERS)}"
        raise ValueError(f'{hint}; any other is a class, as "torch.optim:NAdam"')
    kind = member_at(name)
    from torch.optim import Optimizer

    if not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        raise ValueError("it is no class of optimizers of torch")
    try:
        inspect.signature(kind.step).bind(None)
    except TypeError:
        raise ValueError(
            "its step() needs a function that computes the loss again, which a pipeline does not "
            "do; use one that steps by gradients, such as AdamW"
        ) from None
    return name


@dataclass(frozen=True)
class OptimizerSettings(Table):
    """The optimizer of a job, and the changes of its learning rate over the steps.

    The keys of a job file's table ``optimizer`` (``docs/reference/files.md``). ``follows`` is the
    loss of steps, ``"loss"``, or a result of evaluations by its name in a run's records. With
    neither ``fused`` nor ``foreach``, parameters are stepped one by one.
    """

    name: Annotated[str, AfterValidator(optimizer_name)] = "adamw"
    learning_rate: Amount = 1e-3
    weight_decay: Amount = 0.0
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    momentum: float = 0.9
    schedule: Literal["cosine", "constant", "plateau"] = "cosine"
    plateau: Mapping[str, Any] = field(default_factory=dict[str, Any])
    follows: str = "evaluation_loss"
    schedule_steps: Interval = 0
    warm_up_steps: Interval = 10
    fused: bool = True
    foreach: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    no_decay: Annotated[tuple[str, ...], Field(strict=False)] = ()
    groups: Annotated[tuple[Mapping[str, Any], ...], Field(strict=False)] = ()

    def __post_init__(self) -> None:
        for group in self.groups:
            if not isinstance(group.get("parameters"), str | list | tuple):
                raise BadInput(
                    f"a group of the optimizer has no parameters but {', '.join(group)}; write "
                    f'{{ parameters = "*.bias", weight_decay = 0.0 }}'
                )
        if self.arguments and self.name in OPTIMIZERS:
            raise BadInput(
                f'optimizer.arguments are for a class, as name = "torch.optim:NAdam", and not for '
                f"'{self.name}', whose keys stand in [optimizer]"
            )
        if self.schedule != "plateau":
            if self.plateau or self.follows != "evaluation_loss":
                raise BadInput(
                    f'optimizer.plateau and optimizer.follows are for schedule = "plateau", and '
                    f'schedule is "{self.schedule}"; leave them out'
                )
        elif self.warm_up_steps:
            raise BadInput(
                'optimizer.schedule = "plateau" has no warm-up; set optimizer.warm_up_steps = 0'
            )
        else:
            import torch
            from torch.optim import SGD
            from torch.optim.lr_scheduler import ReduceLROnPlateau

            try:
                ReduceLROnPlateau(SGD([torch.zeros(1)]), **self.plateau)
            except (TypeError, ValueError) as problem:
                raise BadInput(
                    f"optimizer.plateau: {problem}; give arguments of ReduceLROnPlateau, such as "
                    f"{{ factor = 0.5, patience = 2 }}"
                ) from None
        if self.fused and self.foreach:
            raise BadInput(
                "the optimizer is to be both fused and foreach; set one of them, or fused = false"
            )


def as_optimizer(value: object) -> object:
    """The ``[optimizer]`` table; without a word on ``fused``, ``foreach`` takes its place."""
    table: Any = value
    one = isinstance(value, dict) and table.get("foreach") is True
    return {"fused": False, **table} if one else value


def as_groups(value: object) -> object:
    """The ``[tensor_parallel]`` table; a number or a list are its sizes of groups."""
    if isinstance(value, TensorSettings):
        return value
    table: Any = value if isinstance(value, dict) else {"ranks": value}
    sizes = table.get("ranks")
    return {**table, "ranks": [sizes]} if isinstance(sizes, int) else table


def short_for(key: str) -> BeforeValidator:
    """A field that is a table; a text in place of the table is the value of its ``key``."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


NUMBER = re.compile("[0-9]{1,9}")


def with_numbers(table: Any) -> Any:
    """A table with numbers for keys that are such: TOML keys are always text."""
    if not isinstance(table, dict):
        return table
    return {int(k) if NUMBER.fullmatch(str(k)) else k: v for k, v in table.items()}


def as_dynamic(value: object) -> object:
    """Dimensions with their lengths, or ``"auto"``."""
    if value == "auto":
        return value
    if isinstance(value, str):
        raise ValueError('write "auto", or a table of the dimensions that vary')
    return LENGTHS.validate_python(with_numbers(value))


Dimension = Annotated[int, Field(strict=False)]  # TOML has keys of text
LENGTHS = TypeAdapter[Any](
    Mapping[Any, Mapping[Dimension, Annotated[Length, short_for("name")]]], config=CHECKED
)


CALLS: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "data": ("split", "seed", "start_step", "batch_size"),
    "loss": ("output", "target"),
    "metrics": ("output", "target"),
    "callbacks": ("pipe", "event"),
    "quantise": ("name", "weight"),
    "tensor_parallel": ("model", "mesh"),
}
"""The keys of a job file that name functions, each with the arguments that these are given."""


def named_function(key: str) -> PlainValidator:
    """The field of a job that is a function of this key, which a file names."""
    return PlainValidator(partial(function_named, key))


def as_weights(value: object) -> object:
    """The weights of a job, whose table may name a function."""
    table: Any = value
    if isinstance(table, dict) and "quantise" in table:
        return {**table, "quantise": function_named("quantise", table["quantise"])}
    return table


def function_named(key: str, value: object) -> object:
    """A function, or that which a text names; raises ValueError for anything else.

    As a metric, a text without a colon is the place of a part of the loss. A loss may be a list of
    weighted functions.
    """
    if isinstance(value, str):
        if key == "metrics" and ":" not in value:
            return value
        value = member_at(value)
        if not (key == "loss" and isinstance(value, list)):
            check_call(value, key)
    elif not (
        value is None or callable(value) or (key == "loss" and isinstance(value, list | tuple))
    ):
        raise ValueError(MALFORMED)
    return value


def check_call(function: Any, kind: str) -> None:
    """Raise ValueError if ``function`` cannot be called as the functions of ``kind`` are."""
    called = f"{kind}({', '.join(CALLS[kind])})"
    if not callable(function):
        raise ValueError(
            f"it is no function but a {type(function).__name__}; write a function {called} that "
            f"makes use of it, and name that"
        )
    if inspect.isclass(function) and kind in ("loss", "metrics"):
        raise ValueError(
            f"it is a class; name a function {called}, or an object of the class that a module "
            f"holds"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function of C++ without one
        return
    needs_given = {"needs": None} if kind == "data" and "needs" in signature.parameters else {}
    try:
        signature.bind(*CALLS[kind], **needs_given)
    except TypeError as problem:
        own = ", ".join(signature.parameters)
        raise ValueError(
            f"it takes ({own}), but is called as {called}: {problem}; write a function with these "
            f"arguments around it, and name that"
        ) from None


@dataclass(frozen=True)
class TensorSettings(Table):
    """Tensor groups that a plan may have, and what they divide.

    ``ranks`` are the sizes of groups that a planner may choose, beside single ranks. ``layers`` or
    a ``function`` is the ``tensor_parallel`` of `capture_model` (neither: that of the model's own
    ``base_model_tp_plan``).
    """

    ranks: Annotated[tuple[GroupSize, ...], Field(strict=False)] = ()
    layers: Mapping[str, Literal["colwise", "rowwise"]] | None = None
    function: Annotated[Callable[..., object] | None, named_function("tensor_parallel")] = None

    def __post_init__(self) -> None:
        if self.layers is not None and self.function is not None:
            raise BadInput("tensor_parallel has both layers and function; leave one of them out")

    @property
    def is_wanted(self) -> bool:
        """Return whether costs on groups are required."""
        return bool(self.ranks) or self.layers is not None or self.function is not None


class GivenGroups(TensorSettings):
    """The groups of a given plan, so the whole model need not be divisible."""


def checked_file_name(name: str) -> str:
    """A name that a file or directory can have; raises ValueError for any other."""
    is_plain = name.isprintable() and "/" not in name and name not in (".", "..")
    if not is_plain or not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(
            f"it cannot name a directory; use 1 to {LONGEST_NAME} printable characters without "
            f"'/', and not '.' or '..'"
        )
    return name


@dataclass(frozen=True, config=CHECKED)
class Job:
    """Everything that ``penstock train`` needs: a model, data, and training settings.

    The keys of a job file (``docs/reference/files.md``). ``batch_size`` is the global batch in
    samples; a plan cuts it into micro-batches of one of ``micro_batch_sizes`` (empty: every
    divisor). ``accumulate`` is the number of batches in a step; each is a flush of the pipeline, so
    a step has ``accumulate * batch_size`` samples. ``loss`` is None if the model returns its loss.
    ``model``, ``data``, ``loss``, metrics and callbacks must be importable functions, because each
    worker process imports them. A callback that calls ``pipe.stop()`` ends the run after the next
    step.

    ``dynamic`` ``"auto"``: dimensions in which the first batches of the data differ are dynamic.
    ``on_non_finite`` ``"roll-back"``: after a step whose loss or gradients are not finite, train
    again from the last checkpoint, and leave out its batch. Pipelines that train alone meet before
    the final weights are saved. A plan that the run makes keeps to the ``constraints``.
    """

    name: Annotated[str, AfterValidator(checked_file_name)]
    model: Annotated[Callable[[], Module], named_function("model")]
    data: Annotated[Data, named_function("data")]
    loss: Annotated[Loss | None, named_function("loss")] = None
    batch_size: Count = 16
    micro_batch_sizes: Counts = ()
    steps: Count = 100
    seed: Interval = 0
    optimizer: Annotated[OptimizerSettings, BeforeValidator(as_optimizer)] = OptimizerSettings()
    clip_norm: Amount = 1.0
    evaluate_every: Interval = 50
    evaluation_batches: Count = 2
    checkpoint_every: Interval = 100
    stop_early: Interval = 0
    keep_best: bool = False
    autocast: Literal["off", "bfloat16", "float16"] = "off"
    granularity: Literal["block", "module", "operator"] = "module"
    accumulate: Count = 1
    compile: bool = False
    loss_scaling: LossScaling = LossScaling()
    gradient_dtype: Literal["", "float32"] = ""
    metrics: Mapping[str, Annotated[Metric, named_function("metrics")]] = field(
        default_factory=dict[str, Metric]
    )
    callbacks: Annotated[
        tuple[Annotated[Callback, named_function("callbacks")], ...], Field(strict=False)
    ] = ()
    trackers: Annotated[tuple[str, ...], Field(strict=False)] = ()
    verify: Literal["first-step", "off"] = "first-step"
    compare_replicas_every: Interval = 50
    meet_every: Interval = 0
    outer_learning_rate: Amount = 1.0
    outer_momentum: Amount = 0.0
    average_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    on_non_finite: Literal["stop", "skip", "roll-back"] = "stop"
    batch_limit_s: Amount = 600.0
    weights: Annotated[Weights | None, short_for("directory"), BeforeValidator(as_weights)] = None
    save_weights: Annotated[Path | None, Field(strict=False)] = None
    constraints: Constraints = Constraints()
    tensor_parallel: Annotated[TensorSettings, BeforeValidator(as_groups)] = TensorSettings()
    dynamic: Annotated[Dynamic | Literal["auto"], PlainValidator(as_dynamic)] = field(
        default_factory=dict[str | int | tuple[str | int, ...], Dimensions]
    )
    rows: Annotated[Mapping[LeafKey, int], BeforeValidator(with_numbers)] = field(
        default_factory=dict[LeafKey, int]
    )

    def __post_init__(self) -> None:
        whose = f"job '{self.name}'"
        check_batch(self.batch_size)
        member_named(PLANNERS, self.constraints.planner, "planner")
        schedules_named(self.constraints.schedule, self.constraints.planner)
        for name in self.metrics:
            from penstock.runtime.metrics import RECORDED

            if name in RECORDED or name.startswith("evaluation_"):
                raise BadInput(
                    f"{whose}: a metric is called '{name}', as a column of the run's own records "
                    f"is; call it something else"
                )
        for size in self.micro_batch_sizes:
            if self.batch_size % size:
                sizes = micro_batch_sizes_of(self.batch_size)
                raise BadInput(
                    f"{whose}: micro-batch size {size} does not divide the batch size "
                    f"{self.batch_size}; use one of {list(sizes[::-1][:12])}"
                )
        if self.follows_evaluations:
            known = [f"evaluation_{name}" for name in ("loss", *self.metrics)]
            if self.optimizer.follows not in known or not self.evaluate_every:
                raise BadInput(
                    f"{whose}: optimizer.follows is '{self.optimizer.follows}', and evaluate_every "
                    f"{self.evaluate_every}; let it follow 'loss', or with evaluate_every above 0 "
                    f"one of {known}"
                )
        check_conflicts(self.uses, f"{whose}: ")
        if self.trackers:
            from penstock.runtime.trackers import check_trackers

            check_trackers(self.trackers, whose, installed=False)
        if self.meet_every or (self.outer_learning_rate, self.outer_momentum) != (1, 0):
            _ = self.update

    @property
    def uses(self) -> dict[str, str]:
        """The features that the job uses, for `check_conflicts`."""
        settings = vars(self) | {
            "constraints.sharding": self.constraints.sharding,
            "constraints.state_on": self.constraints.state_on,
            "optimizer.name": self.optimizer.name,
            "tensor_parallel.ranks": self.tensor_parallel.ranks,
        }
        return uses_of_settings(settings, toml=True)

    @property
    def update(self) -> "Update":
        """The `Update` of its pipeline; a run that rolls back does so where that stops."""
        import torch

        from penstock.runtime.options import Update

        return Update(
            weights=self.weights,
            seed=self.seed,
            loss_scaling=self.loss_scaling if self.autocast == "float16" else None,
            gradient_dtype=torch.float32 if self.gradient_dtype else None,
            state_on="host" if self.constraints.state_on == "host" else "device",
            schedule_follows="evaluation" if self.follows_evaluations else "loss",
            meet_every=self.meet_every,
            outer_learning_rate=self.outer_learning_rate,
            outer_momentum=self.outer_momentum,
            on_non_finite="skip" if self.on_non_finite == "skip" else "stop",
        )

    @property
    def shards_optimizer(self) -> bool:
        """Return whether replicas shard the optimizer's state, also under a plan that was given."""
        return self.constraints.sharding == "optimizer"

    @property
    def follows_evaluations(self) -> bool:
        """Return whether the learning-rate schedule is stepped with a result of evaluations."""
        return self.optimizer.schedule == "plateau" and self.optimizer.follows != "loss"

    @property
    def average(self) -> "ExponentialAverage | None":
        """The average of the weights that is evaluated and saved, if there is one."""
        from penstock.runtime.update.average import ExponentialAverage

        return ExponentialAverage(self.average_decay) if self.average_decay else None

    @property
    def reads_parts(self) -> bool:
        """Return whether the data can receive what a rank reads."""
        return "needs" in inspect.signature(self.data).parameters

    def batches(
        self, split: Split, start_step: int = 0, needs: "BatchNeeds | None" = None
    ) -> Iterator[Batch]:
        """One batch for each step from ``start_step`` on; of what a rank ``needs``, if given.

        Data that know no needs yield whole batches in any case. The process ends if a batch has not
        come within ``batch_limit_s``.
        """
        from torch.utils.data import DataLoader

        needs_given = {"needs": needs} if self.reads_parts else {}

        def call_data() -> Iterator[Batch]:
            found = self.data(split, self.seed, start_step, self.batch_size, **needs_given)
            if isinstance(found, DataLoader):
                raise BadInput(
                    f"job '{self.name}': its data returns a DataLoader, which does not start "
                    f"at step {start_step + 1}; name a function without arguments that returns "
                    f"the loader, or the loader itself, and resuming is exact"
                )
            return found

        what = f"the data of job '{self.name}', split '{split}', from step {start_step + 1}"
        return HEARTBEAT.read(call_data, what, self.batch_limit_s)

    def example_batch(self) -> Batch:
        """The first batch of the training data."""
        for batch in self.batches("train"):
            return batch
        raise BadInput(
            f"job '{self.name}': data('train', {self.seed}, 0, {self.batch_size}) yields no batch; "
            f"it must yield one for each step"
        )

    def autocast_dtype(self) -> "torch.dtype | None":
        """The type of matrix products; None for the parameters' own type."""
        import torch

        return {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.autocast]

    def micro_batch_choices(self) -> tuple[int, ...]:
        """The micro-batch sizes a planner may use, largest first."""
        return self.micro_batch_sizes or micro_batch_sizes_of(self.batch_size)
