"""Finds built-in jobs by name, and reads jobs from TOML files.

A job file names the functions that make the job:

    name = "my-model"
    model = "my_package.model:build"       # build() -> nn.Module
    data = "my_package.data:batches"       # batches(split, seed, start_step, batch_size)
    loss = "torch.nn.functional:cross_entropy"
    batch_size = 32
    steps = 1000

    callbacks = ["my_package.training:note"]   # note(pipe, event), see penstock.runtime.callbacks

    [optimizer]
    learning_rate = 1e-3

    [dynamic]                                  # dimensions of the batch that vary
    input_ids = { 1 = "length" }               # or { 1 = { name = "length", max = 512 } }

    [tensor_parallel]                          # or only: tensor_parallel = 2
    ranks = [2, 4]                             # groups that the plan may have
    layers = { "*.up" = "colwise", "*.down" = "rowwise" }   # unless the model says it itself

    [metrics]
    accuracy = "my_package.model:accuracy"     # accuracy(output, target)

A variation of a built-in job names that job, and what is different:

    base = "gpt-text"
    steps = 40

Modules are searched beside the file, in the working directory, and among installed packages.
"""

import importlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.capture.lengths import Dynamic, Length
from penstock.document import Entry, read_document
from penstock.errors import BadInput
from penstock.jobs.job import Job, OptimizerSettings, TensorSettings
from penstock.jobs.registry import JOBS
from penstock.jobs.removed import REMOVED_KEYS
from penstock.runtime.gradients.loss_scaling import LossScaling
from penstock.runtime.weights.pretrained import Weights

__all__ = ["find_job", "read_job"]

NUMBER = re.compile("[0-9]{1,9}")

TABLES = {
    "base",
    "optimizer",
    "loss_scaling",
    "weights",
    "save_weights",
    "dynamic",
    "tensor_parallel",
}
"""Keys of a file that do not directly set a field of `Job`."""


class OptimizerEntry(Entry):
    """The ``[optimizer]`` table; omitted keys keep their values."""

    name: Literal["adamw", "adam", "sgd", "muon"] | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    betas: list[float] | None = Field(default=None, min_length=2, max_length=2)
    momentum: float | None = None
    schedule: Literal["cosine", "constant"] | None = None
    warm_up_steps: int | None = None
    fused: bool | None = None
    foreach: bool | None = None


class LossScalingEntry(Entry):
    """The ``[loss_scaling]`` table; omitted keys keep their values."""

    initial: float | None = None
    growth: float | None = None
    backoff: float | None = None
    growth_interval: int | None = None
    smallest: float | None = None


class WeightsEntry(Entry):
    """The ``[weights]`` table; a relative ``directory`` is relative to the job file."""

    directory: str
    new: list[str] = Field(default_factory=list[str])
    unused: list[str] = Field(default_factory=list[str])


class LengthEntry(Entry):
    """A length with limits or buckets in the ``[dynamic]`` table."""

    name: str
    min: int = 1
    max: int | None = None
    buckets: list[int] = Field(default_factory=list[int])
    pad: float | None = None

    def value(self) -> str | Length:
        """The declared length, or only its name if nothing else is given."""
        length = Length(self.name, self.min, self.max, tuple(self.buckets), self.pad)
        return self.name if length == Length(self.name) else length


class TensorEntry(Entry):
    """The ``[tensor_parallel]`` table."""

    ranks: list[int] | None = None
    layers: dict[str, Literal["colwise", "rowwise"]] | None = None


AUTO: dict[str, dict[str, LengthEntry]] = {"auto": {}}
"""How ``dynamic = "auto"`` is represented."""


def as_table(value: object) -> object:
    """The ``[dynamic]`` table, or `AUTO` for the word "auto"."""
    if isinstance(value, str) and value != "auto":
        raise ValueError('write "auto", or a table of the dimensions that vary')
    return AUTO if value == "auto" else value


def as_entry(value: object) -> object:
    """A length as a table; a string is its name."""
    return {"name": value} if isinstance(value, str) else value


def as_groups(value: object) -> object:
    """The ``[tensor_parallel]`` table; a number or a list are its sizes of groups."""
    table: Any = value if isinstance(value, dict) else {"ranks": value}
    sizes = table.get("ranks")
    return {**table, "ranks": [sizes]} if isinstance(sizes, int) else table


# With a union type, the error for a wrong key would list every alternative.
LengthTable = Annotated[LengthEntry, BeforeValidator(as_entry)]
TensorTable = Annotated[TensorEntry, BeforeValidator(as_groups)]
DynamicTable = Annotated[dict[str, dict[str, LengthTable]], BeforeValidator(as_table)]


class JobEntry(Entry):
    """A whole job file; omitted keys are as in ``base``, or have their defaults."""

    removed: ClassVar[Mapping[str, str]] = REMOVED_KEYS

    base: str | None = None
    name: str | None = None
    model: str | None = None
    data: str | None = None
    loss: str | None = None
    batch_size: int | None = None
    micro_batch_sizes: list[int] | None = None
    steps: int | None = None
    seed: int | None = None
    clip_norm: float | None = None
    evaluate_every: int | None = None
    evaluation_batches: int | None = None
    checkpoint_every: int | None = None
    autocast: Literal["off", "bfloat16", "float16"] | None = None
    granularity: Literal["block", "module", "operator"] | None = None
    accumulate: int | None = None
    shard_optimizer: bool | None = None
    compile: bool | None = None
    optimizer_sync: Literal["before", "after"] | None = None
    callbacks: list[str] | None = None
    trackers: list[str] | None = None
    metrics: dict[str, str] | None = None
    weights: str | WeightsEntry | None = None
    save_weights: str | None = None
    tensor_parallel: TensorTable = TensorEntry()
    verify: Literal["first-step", "off"] | None = None
    compare_replicas_every: int | None = None
    on_non_finite: Literal["stop", "skip", "roll-back"] | None = None
    batch_limit_s: float | None = None
    optimizer: OptimizerEntry = OptimizerEntry()
    loss_scaling: LossScalingEntry = LossScalingEntry()
    dynamic: DynamicTable | None = None


def find_job(name_or_path: str | Path) -> Job:
    """The built-in job of this name, or the job in the TOML file at this path.

    Raises:
        BadInput: neither, or the file does not describe a job.
    """
    if place := JOBS.get(str(name_or_path)):
        return function_at(place, f"built-in job '{name_or_path}'")()
    path = Path(name_or_path)
    if not os.path.exists(path):
        near = get_close_matches(str(name_or_path), JOBS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "use one of them or write the file"
        raise BadInput(
            f"job '{name_or_path}' is neither built in ({', '.join(JOBS)}) nor an existing TOML "
            f"file; {hint}"
        )
    return read_job(path)


def read_job(path: str | Path) -> Job:
    """The job in a TOML file.

    Raises:
        BadInput: a syntax error, an unknown key, a wrong value, or a function that is missing.
    """
    path = Path(path)
    if path.suffix != ".toml":
        raise BadInput(f"job file '{path}' does not end in .toml; rename it if it is TOML")
    entry = read_document(JobEntry, path, "job file")
    for folder in (str(path.resolve().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        return job_of(entry, path)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def job_of(entry: JobEntry, path: Path) -> Job:
    """The job that a validated file describes."""
    places = {"model": entry.model, "data": entry.data}
    missing = [key for key, place in places.items() if place is None]
    if entry.base is None and missing:
        raise BadInput(
            f"key '{missing[0]}' is missing; name a function as \"module:function\", or a built-in "
            f'job as base = "{next(iter(JOBS))}"'
        )
    if entry.base is not None and entry.base not in JOBS:
        near = get_close_matches(entry.base, JOBS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(JOBS)}"
        raise BadInput(f"base is '{entry.base}', which is not a built-in job; {hint}")
    changes: dict[str, Any] = {
        key: value for key, value in entry.model_dump(exclude=TABLES).items() if value is not None
    }
    for key, field in (("model", "build_model"), ("data", "data"), ("loss", "loss")):
        if key in changes:
            changes[field] = function_at(changes.pop(key), key)
    if isinstance(entry.weights, str):
        changes["weights"] = Weights(path.parent / entry.weights)
    elif entry.weights is not None:
        place, new, unused = entry.weights.directory, entry.weights.new, entry.weights.unused
        changes["weights"] = Weights(path.parent / place, tuple(new), tuple(unused))
    if entry.save_weights is not None:
        changes["save_weights"] = path.parent / entry.save_weights
    if "callbacks" in changes:
        changes["callbacks"] = tuple(function_at(p, "callbacks") for p in changes["callbacks"])
    if "trackers" in changes:
        changes["trackers"] = tuple(changes["trackers"])
    if "metrics" in changes:
        metrics = changes["metrics"].items()
        changes["metrics"] = {name: function_at(p, f"metrics.{name}") for name, p in metrics}
    if entry.dynamic is not None:
        changes["dynamic"] = "auto" if entry.dynamic == AUTO else dynamic_of(entry.dynamic)
    if "micro_batch_sizes" in changes:
        changes["micro_batch_sizes"] = tuple(changes["micro_batch_sizes"])
    elif "batch_size" in changes:
        changes["micro_batch_sizes"] = ()
    base = None if entry.base is None else find_job(entry.base)
    settings = base.optimizer if base else OptimizerSettings()
    changes["optimizer"] = replace(settings, **optimizer_changes(entry.optimizer))
    scaling = base.loss_scaling if base else LossScaling()
    given = {k: v for k, v in entry.loss_scaling.model_dump().items() if v is not None}
    changes["loss_scaling"] = replace(scaling, **given)
    groups = base.tensor_parallel if base else TensorSettings()
    changes["tensor_parallel"] = replace(groups, **tensor_changes(entry.tensor_parallel))
    changes.setdefault("name", path.stem)
    return replace(base, **changes) if base else Job(**changes)


def dynamic_of(table: Mapping[str, Mapping[str, LengthEntry]]) -> Dynamic:
    """The dimensions that vary. TOML keys are always text, so numbers are converted.

    Raises:
        BadInput: a dimension is not a number.
    """
    found: dict[str | int | tuple[str | int, ...], dict[int, str | Length]] = {}
    for key, dimensions in table.items():
        own = found[int(key) if NUMBER.fullmatch(key) else key] = {}
        for dim, named in dimensions.items():
            if not NUMBER.fullmatch(dim):
                raise BadInput(
                    f"dynamic.{key} has the key '{dim}', but dimensions are numbers; write "
                    f'{key} = {{ 1 = "length" }}'
                )
            own[int(dim)] = named.value()
    return found


def optimizer_changes(entry: OptimizerEntry) -> dict[str, Any]:
    """The optimizer settings that the file contains."""
    given = {key: value for key, value in entry.model_dump().items() if value is not None}
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    if given.get("foreach") and "fused" not in given:
        given["fused"] = False
    return given


def tensor_changes(entry: TensorEntry) -> dict[str, Any]:
    """The settings of tensor groups that the file contains."""
    given = {key: value for key, value in entry.model_dump().items() if value is not None}
    if "ranks" in given:
        given["ranks"] = tuple(given["ranks"])
    return given


def function_at(place: str, key: str) -> Any:
    """The function at ``module:function``; a loss may be a list of weighted functions.

    Raises:
        BadInput: the place is malformed, the import fails, or the module has no such function.
    """
    module_name, colon, name = place.partition(":")
    if not (module_name and colon and name):
        raise BadInput(
            f'{key} is \'{place}\'; write it as "module:function", for example "my_model:build"'
        )
    if module_name.startswith("."):
        raise BadInput(
            f"{key} is '{place}', but a job file belongs to no package, so '.' means nothing; "
            f"write the module's whole name"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(
            f"{key} is '{place}', but importing '{module_name}' failed: {error}; put the module "
            f"beside the job file or install it"
        ) from error
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise BadInput(
            f"{key} is '{place}', but importing '{module_name}' ended with {kind}: {error}; a "
            f"module of a job only defines, it runs nothing while it is imported"
        ) from error
    function = getattr(module, name, None)
    if not callable(function) and not (key == "loss" and isinstance(function, list)):
        near = get_close_matches(name, dir(module), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"define it in {module.__file__}"
        raise BadInput(f"{key} is '{place}', but '{module_name}' has no function '{name}'; {hint}")
    return function
