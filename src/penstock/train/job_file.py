"""Find built-in jobs by name, and read jobs from TOML files.

A job file names the functions that make the job (all keys: ``docs/reference/files.md``):

    name = "my-model"
    model = "my_package.model:build"       # build() -> nn.Module
    data = "my_package.data:batches"       # batches(split, seed, start_step, batch_size)
    loss = "torch.nn.functional:cross_entropy"
    batch_size = 32

    [optimizer]
    learning_rate = 1e-3

A model may be a class, and data a dataset, a loader, or text (`penstock.train.samples`). A
variation of a built-in job names that job as ``base``, and what is different. Modules are searched
in the standard library, in the working directory, beside the file, and among installed packages.
"""

import json
import os
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, cast

from penstock.errors import BadInput
from penstock.files import Entry, in_one_line, parse_toml, read_text, unknown_key
from penstock.runtime.tables import Constraints, LossScaling
from penstock.train import JOBS
from penstock.train.job import CALLS, Job, OptimizerSettings, short_for


class TextTable(Entry):
    """Text as data: a file or directory (none for estimates), a tokenizer's file, and tokens in a
    window."""

    path: str = ""
    tokenizer: str = ""
    length: int = 128


class MadeOf(Entry):
    """The keys of a job file that say how the model and the data are made."""

    model_arguments: dict[str, Any] | None = None
    data_arguments: dict[str, Any] | None = None
    held_out: float | str | None = None
    collate: str | None = None
    text: Annotated[TextTable | None, short_for("path")] = None


KEYS = ("base", *MadeOf.model_fields, *(field.name for field in fields(Job)))
"""The keys of a job file: the fields of a job, those that make them, and a built-in job."""

INNER = (
    *(f"optimizer.{field.name}" for field in fields(OptimizerSettings)),
    *(f"loss_scaling.{field.name}" for field in fields(LossScaling)),
    *(f"constraints.{field.name}" for field in fields(Constraints)),
)
"""The keys of its tables."""

EXAMPLES = Path(__file__).parents[1] / "examples"
"""The folder of the built-in jobs."""

PLACE = re.compile(r"[^.:][^:]*:[^:]+")
"""Text that names a function, whose module is not imported before all else is checked."""


def find_job(name_or_path: str | Path, changes: Sequence[str] = ()) -> Job:
    """The built-in job of this name, or the job in the TOML file at this path.

    ``changes`` are keys of a job file with values of their own, each as ``key=value``; a key of a
    table is ``table.key``, and text needs no quotes.
    """
    return job_of(*checked_table(name_or_path, changes))


def checked_table(
    name_or_path: str | Path, changes: Sequence[str] = ()
) -> tuple[dict[str, Any], Path]:
    """The table of a job, of which all is checked but the functions that it names.

    That imports neither torch nor the job's own modules.
    """
    path = Path(name_or_path)
    if str(name_or_path) in JOBS:
        table = dict[str, Any](base=str(name_or_path))
    elif not os.path.exists(path):
        near = get_close_matches(str(name_or_path), JOBS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "use one of them or write the file"
        raise BadInput(
            f"job '{name_or_path}' is neither built in ({', '.join(JOBS)}) nor an existing TOML "
            f"file; {hint}"
        )
    elif path.suffix != ".toml":
        raise BadInput(f"job file '{path}' does not end in .toml; rename it if it is TOML")
    else:
        table = parse_toml(read_text(path, "job file"), path, "job file")
    with in_one_line(f"{path}: " if path.suffix else ""):
        table = varied(with_changes(table, changes))
        for key in table:
            if key not in KEYS:
                raise BadInput(unknown_key(key, KEYS, INNER))
        table.setdefault("name", path.stem)
        given = keys_of_making(table)
        if "model" not in table or ("data" not in table and given.text is None):
            key = "data" if "model" in table else "model"
            raise BadInput(
                f"key '{key}' is missing; name a function as \"module:function\", or a "
                f'built-in job as base = "{JOBS[0]}"'
                + (', or write text = "FILE"' if key == "data" else "")
            )
        own = {key: value for key, value in table.items() if key not in MadeOf.model_fields}
        unread = {key: without_functions(own[key]) for key in CALLS if key in own}
        if isinstance(weights := own.get("weights"), dict) and "quantise" in weights:
            unread["weights"] = {**weights, "quantise": without_functions(weights["quantise"])}
        Job(**{"data": len, **own, **unread})
    return table, path


def key_lines(table: Mapping[str, Any], of: str = "") -> Iterator[str]:
    """The keys of a table with their values, as ``--set`` takes them.

    >>> list(key_lines({"steps": 5, "optimizer": {"name": "sgd"}}))
    ['steps = 5', 'optimizer.name = "sgd"']
    """
    for key, value in table.items():
        if isinstance(value, dict):
            yield from key_lines(cast("dict[str, Any]", value), f"{of}{key}.")
        else:
            yield f"{of}{key} = {json.dumps(value, ensure_ascii=False)}"


def without_functions(value: Any) -> Any:
    """The value of a key, with a function for each text that names one."""
    match value:
        case str():
            return len if PLACE.fullmatch(value) else value
        case list():
            return [without_functions(each) for each in cast("list[Any]", value)]
        case dict():
            named = cast("dict[str, Any]", value)
            return {key: without_functions(each) for key, each in named.items()}
        case _:
            return value


def varied(table: dict[str, Any]) -> dict[str, Any]:
    """The table, with the keys of the built-in job that it varies."""
    name = table.pop("base", None)
    if name is None:
        return table
    if name not in JOBS:
        near = get_close_matches(str(name), JOBS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(JOBS)}"
        raise BadInput(f"base is '{name}', which is not a built-in job; {hint}")
    path = EXAMPLES / f"{name}.toml"
    base = varied(parse_toml(read_text(path, "job file"), path, "job file"))
    if "batch_size" in table:
        base.pop("micro_batch_sizes", None)
    if "text" in table:
        del base["data"]
    for key, own in table.items():
        if isinstance(own, dict) and isinstance(base.get(key), dict):
            table[key] = base[key] | own
    return base | table


def with_changes(table: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """The table of a job file with other values of some keys; see `find_job`."""
    for change in changes:
        key, equals, text = change.partition("=")
        *tables, last = key.strip().split(".")
        if not (equals and last and all(tables)):
            raise BadInput(f"--set {change} is no key=value; write --set steps=40, for example")
        if (top := (*tables, last)[0]) not in KEYS:
            raise BadInput(f"--set {change}: {unknown_key(top, KEYS, INNER)}")
        place = table
        for name in tables:
            inner = place.setdefault(name, {})
            if not isinstance(inner, dict):
                # A text or a number, which is short for a table.
                raise BadInput(
                    f"--set {change}: {name} is no table in the job, but {inner!r}; give all of "
                    f"it, as --set '{name}={{ {last} = {text} }}'"
                )
            place = cast("dict[str, Any]", inner)
        try:
            place[last] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            place[last] = text
    return table


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


def job_of(table: dict[str, Any], path: Path) -> Job:
    """The job of a table that is checked, with the functions that it names."""
    if path.suffix:
        search_beside(path)
    weights = in_folder_of(table.get("weights"), "directory", path, Path)
    table = {**in_folder_of(table, "save_weights", path), "weights": weights}
    with in_one_line(f"{path}: " if path.suffix else ""):
        return Job(**with_parts(table, path))


def keys_of_making(table: dict[str, Any]) -> MadeOf:
    """The keys that say how model and data are made."""
    return MadeOf(**{key: table[key] for key in MadeOf.model_fields if key in table})


def with_parts(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """The table with a model and data where its keys only say how to make them."""
    from penstock.train.samples import HELD_OUT, ModelOfArguments, TextData, data_named

    given = keys_of_making(table)
    table = {key: value for key, value in table.items() if key not in MadeOf.model_fields}
    key = "model_arguments"
    try:
        if given.model_arguments is not None:
            arguments = in_folder_of(given.model_arguments, "config", path)
            table["model"] = ModelOfArguments(table["model"], arguments)
        key = "text" if given.text is not None else "data"
        if given.text is not None:
            if "data" in table:
                raise ValueError("it stands in place of data; leave one of them out")
            text = in_folder_of(in_folder_of(vars(given.text), "path", path), "tokenizer", path)
            held_out = HELD_OUT if given.held_out is None else given.held_out
            own_loss = table.get("loss") is None
            table["data"] = TextData(
                text["path"], {}, held_out, None, text["tokenizer"], text["length"], own_loss
            )
        elif isinstance(table.get("data"), str):
            arguments = given.data_arguments or {}
            table["data"] = data_named(table["data"], arguments, given.held_out, given.collate)
    except ValueError as problem:
        raise BadInput(f"{key}: {problem}") from None
    return table


def in_folder_of(table: Any, key: str, path: Path, kind: type = str) -> Any:
    """The table, or a text in its place, with the file of ``key`` in the folder of the job's."""
    table = {key: table} if isinstance(table, str) else table
    own = table.get(key) if isinstance(table, dict) else None
    return {**table, key: kind(path.parent / own)} if isinstance(own, str) and own else table
