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

    [rows]                                     # rows of a tensor that each sample has
    pixel_values = 4

    [tensor_parallel]                          # or only: tensor_parallel = 2
    ranks = [2, 4]                             # groups that the plan may have
    layers = { "*.up" = "colwise", "*.down" = "rowwise" }   # unless the model says it itself

    [metrics]
    accuracy = "my_package.model:accuracy"     # accuracy(output, target)

A variation of a built-in job names that job, and what is different:

    base = "gpt-text"
    steps = 40

Modules are searched in the standard library, in the working directory, beside the file, and among
installed packages.
"""

import importlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, create_model
from torch import nn

from penstock.capture.lengths import Dynamic, Length
from penstock.document import Entry, read_document
from penstock.errors import BadInput
from penstock.jobs import JOBS
from penstock.jobs.job import Job, OptimizerSettings, TensorSettings
from penstock.runtime.weights.pretrained import Weights

__all__ = ["REMOVED_KEYS", "find_job", "read_job"]

REMOVED_KEYS = {
    "gradient_noise": "leave it out; a callback can compare squared norms of gradients itself",
}


NUMBER = re.compile("[0-9]{1,9}")


def table_of(
    kind: type, entry: type[Entry] = Entry, *, whole: bool = False, **others: Any
) -> type[Entry]:
    """A table of a file: its keys are the fields of the dataclass ``kind``.

    Fields without a default may be left out, unless the table is a ``whole`` one. ``others`` are
    types of keys that a file writes in another way, or None for fields that are no keys.
    """
    hints = get_type_hints(kind)
    keys: dict[str, Any] = {}
    for field in fields(kind):
        hint = others.pop(field.name, hints[field.name])
        if isinstance(hint, type) and is_dataclass(hint):
            hint = table_of(hint)
        elif get_origin(hint) is tuple:
            hint = Annotated[hint, Field(strict=False)]  # TOML has lists
        needed = whole and field.default is MISSING and field.default_factory is MISSING
        if hint is not None:
            keys[field.name] = (hint, ... if needed else None)
    keys |= {name: (hint, None) for name, hint in others.items()}
    return create_model(kind.__name__, __base__=entry, **keys)


def given(entry: Entry, before: Any = None) -> dict[str, Any]:
    """The fields that a table sets; a table in it changes the dataclass in ``before``."""
    found: dict[str, Any] = {}
    for key in entry.model_fields_set:
        value, old = getattr(entry, key), getattr(before, key, None)
        if isinstance(value, Entry):
            value = given(value, old)
            value = value if old is None else replace(old, **value)
        found[key] = tuple(value) if isinstance(value, list) else value
    return found


def as_length(value: object) -> object:
    """A length as a table; a string is its name."""
    return {"name": value} if isinstance(value, str) else value


def as_lengths(value: object) -> object:
    """The ``[dynamic]`` table, or an empty one with the key "auto" for the word "auto"."""
    if isinstance(value, str) and value != "auto":
        raise ValueError('write "auto", or a table of the dimensions that vary')
    return AUTO if value == "auto" else value


def as_groups(value: object) -> object:
    """The ``[tensor_parallel]`` table; a number or a list are its sizes of groups."""
    table: Any = value if isinstance(value, dict) else {"ranks": value}
    sizes = table.get("ranks")
    return {**table, "ranks": [sizes]} if isinstance(sizes, int) else table


def as_optimizer(value: object) -> object:
    """The ``[optimizer]`` table; without a word on ``fused``, ``foreach`` takes its place."""
    table: Any = value
    one = isinstance(value, dict) and table.get("foreach") is True
    return {"fused": False, **table} if one else value


def as_weights(value: object) -> object:
    """The ``[weights]`` table; a string is its directory."""
    return {"directory": value} if isinstance(value, str) else value


AUTO: dict[str, dict[str, Entry]] = {"auto": {}}
"""How ``dynamic = "auto"`` is represented."""

# With a union type, the error for a wrong key would list every alternative.
LengthTable = Annotated[table_of(Length, whole=True), BeforeValidator(as_length)]
TensorTable = Annotated[table_of(TensorSettings, given=None), BeforeValidator(as_groups)]
OptimizerTable = Annotated[table_of(OptimizerSettings), BeforeValidator(as_optimizer)]
WeightsTable = Annotated[table_of(Weights, whole=True, directory=str), BeforeValidator(as_weights)]


class JobEntry(Entry):
    """Refuses keys that job files had once."""

    removed: ClassVar[Mapping[str, str]] = REMOVED_KEYS


JobTable = table_of(
    Job,
    JobEntry,
    base=str,
    build_model=None,
    model=str,
    data=str,
    loss=str,
    callbacks=list[str],
    metrics=dict[str, str],
    optimizer=OptimizerTable,
    weights=WeightsTable,
    save_weights=str,
    tensor_parallel=TensorTable,
    dynamic=Annotated[dict[str, dict[str, LengthTable]], BeforeValidator(as_lengths)],
    rows=dict[str, int],
)
"""A whole job file; omitted keys are as in ``base``, or have their defaults."""

BARE = Job("job", build_model=nn.Identity, data=lambda *asked: iter(()))
"""The settings of a file without ``base``."""


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
    entry = read_document(JobTable, path, "job file")
    search_beside(path)
    try:
        return job_of(entry, path)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def search_beside(path: Path) -> None:
    """Find modules beside a file and in the working directory, too.

    They come before installed packages, but after the standard library, whose modules they may not
    replace for all code of the process.
    """
    library = sysconfig.get_path("stdlib")
    ends = [
        n + 1 for n, place in enumerate(sys.path) if place in (library, f"{library}/lib-dynload")
    ]
    for folder in (str(path.resolve().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(max(ends, default=0), folder)


def job_of(table: Any, path: Path) -> Job:
    """The job that a validated file describes."""
    missing = [key for key in ("model", "data") if getattr(table, key) is None]
    if table.base is None and missing:
        raise BadInput(
            f"key '{missing[0]}' is missing; name a function as \"module:function\", or a built-in "
            f'job as base = "{next(iter(JOBS))}"'
        )
    if table.base is not None and table.base not in JOBS:
        near = get_close_matches(table.base, JOBS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(JOBS)}"
        raise BadInput(f"base is '{table.base}', which is not a built-in job; {hint}")
    base = BARE if table.base is None else find_job(table.base)
    changes = given(table, replace(base, weights=None))
    changes.pop("base", None)
    for key, field in (("model", "build_model"), ("data", "data"), ("loss", "loss")):
        if key in changes:
            changes[field] = function_at(changes.pop(key), key)
    if "callbacks" in changes:
        changes["callbacks"] = tuple(function_at(p, "callbacks") for p in changes["callbacks"])
    if "metrics" in changes:
        metrics = changes["metrics"].items()
        changes["metrics"] = {name: function_at(p, f"metrics.{name}") for name, p in metrics}
    if "weights" in changes:
        place = path.parent / changes["weights"]["directory"]
        changes["weights"] = Weights(**{**changes["weights"], "directory": place})
    if "save_weights" in changes:
        changes["save_weights"] = path.parent / changes["save_weights"]
    if "dynamic" in changes:
        changes["dynamic"] = "auto" if table.dynamic == AUTO else dynamic_of(table.dynamic)
    if "rows" in changes:
        changes["rows"] = {leaf_key(key): count for key, count in changes["rows"].items()}
    if "batch_size" in changes:
        changes.setdefault("micro_batch_sizes", ())
    changes.setdefault("name", path.stem)
    return replace(base, **changes)


def leaf_key(key: str) -> str | int:
    """The key of a tensor in the batch. TOML keys are always text, so numbers are converted."""
    return int(key) if NUMBER.fullmatch(key) else key


def dynamic_of(table: Mapping[str, Mapping[str, Entry]]) -> Dynamic:
    """The dimensions that vary.

    Raises:
        BadInput: a dimension is not a number.
    """
    found: dict[str | int | tuple[str | int, ...], dict[int, str | Length]] = {}
    for key, dimensions in table.items():
        own = found[leaf_key(key)] = {}
        for dim, named in dimensions.items():
            if not NUMBER.fullmatch(dim):
                raise BadInput(
                    f"dynamic.{key} has the key '{dim}', but dimensions are numbers; write "
                    f'{key} = {{ 1 = "length" }}'
                )
            length = Length(**given(named))
            own[int(dim)] = length.name if length == Length(length.name) else length
    return found


CALLS: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "data": ("split", "seed", "start_step", "batch_size"),
    "loss": ("output", "target"),
    "metrics": ("output", "target"),
    "callbacks": ("pipe", "event"),
}
"""The keys of a job file that name functions, each with the arguments that these are given."""


def function_at(place: str, key: str) -> Any:
    """The function at ``module:function``; a loss may be a list of weighted functions.

    Raises:
        BadInput: the place is malformed, the import fails, the module has no such function, or it
            cannot be called with the arguments of ``key``.
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
    if not hasattr(module, name):
        near = get_close_matches(name, dir(module), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"define it in {module.__file__}"
        raise BadInput(f"{key} is '{place}', but '{module_name}' has no function '{name}'; {hint}")
    function = getattr(module, name)
    kind = key.partition(".")[0]
    if kind == "loss" and isinstance(function, list):
        return function
    if kind in CALLS:
        check_call(function, f"{key} is '{place}'", kind)
    return function


def check_call(function: Any, what: str, kind: str) -> None:
    """Raise `BadInput` if ``function`` cannot be called as the functions of ``kind`` are."""
    called = f"{kind}({', '.join(CALLS[kind])})"
    if not callable(function):
        raise BadInput(
            f"{what}, which is no function but a {type(function).__name__}; write a function "
            f"{called} that makes use of it, and name that"
        )
    if inspect.isclass(function) and kind in ("loss", "metrics"):
        raise BadInput(
            f"{what}, which is a class; name a function {called}, or an object of the class that "
            f"a module holds"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function of C++ without one
        return
    told = {"needs": None} if kind == "data" and "needs" in signature.parameters else {}
    try:
        signature.bind(*CALLS[kind], **told)
    except TypeError as problem:
        own = ", ".join(signature.parameters)
        raise BadInput(
            f"{what}, which takes ({own}), but is called as {called}: {problem}; write a function "
            f"with these arguments around it, and name that"
        ) from None
