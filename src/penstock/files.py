"""Read JSON and TOML documents, with errors that name file, key, value and remedy; write them.

Every file format of the project is described by a subclass of `Entry`, or by dataclasses that are
each a `Table`, and read by `read_document`. So a missing file, a syntax error, an unknown key and a
wrong value give the same one-line messages everywhere. A file is written completely or not at all.
"""

import csv
import io
import json
import os
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from penstock.errors import BadInput

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
"""Any value of a JSON document."""

T = TypeVar("T")

LONGEST_SHOWN = 60
"""The most characters of a value in an error message."""

SIGNS = {
    "greater_than_equal": ">=",
    "less_than_equal": "<=",
    "greater_than": ">",
    "less_than": "<",
}


class Entry(BaseModel):
    """A table of a document. Unknown keys are an error that suggests the nearest known key.

    A subclass for someone else's format may set ``extra`` to ``ignore``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown_keys(cls, data: object) -> object:
        """Raise an error for the first unknown key."""
        if cls.model_config.get("extra") == "forbid":
            check_keys(data, list(cls.model_fields))
        return data


class Table:
    """A dataclass that is itself a table of a document, with the rules of an `Entry`.

    Its tuples are lists in the document.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler.resolve_ref_schema(handler(source))
        # Strict about the values, of which a document has the table and not the dataclass.
        cast("dict[str, object]", schema)["strict"] = False
        known = [field.name for field in fields(cast(Any, cls))]

        def read(data: object) -> object:
            check_keys(data, known)
            if not isinstance(data, Mapping):
                return data
            table = cast("Mapping[str, object]", data)
            return {
                key: tuple(cast("list[object]", v)) if isinstance(v, list) else v
                for key, v in table.items()
            }

        return core_schema.no_info_before_validator_function(read, schema)


def check_keys(data: object, known: Sequence[str]) -> None:
    """Raise an error of pydantic's for the first key of a table that is not known."""
    for key in cast("Mapping[str, object]", data) if isinstance(data, Mapping) else ():
        if key not in known:
            words = unknown_key(key, known)
            raise PydanticCustomError("unknown_key", "{problem}", {"problem": words})


def version_is(number: int, older: str) -> Callable[[int], int]:
    """A check that a file has version ``number`` of its format; ``older`` is said of older ones."""

    def check(found: int) -> int:
        if found != number:
            raise ValueError(older if found < number else f"it must be {number}")
        return found

    return check


def unknown_key(key: str, known: Sequence[str], inner: Sequence[str] = ()) -> str:
    """The message that a key is unknown, with the likeliest known one, or one of ``inner``.

    These are keys of tables, as ``table.key``.

    >>> unknown_key("lr", ["steps"], ["optimizer.learning_rate"])
    "unknown key 'lr'; did you mean 'optimizer.learning_rate'?"
    """
    own = {name: name.rpartition(".")[2] for name in (*known, *inner)}
    short = [n for n, end in own.items() if key in (end, "".join(w[:1] for w in end.split("_")))]
    near = short or get_close_matches(key, known, n=1) or get_close_matches(key, own, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"the keys are {', '.join(known)}"
    return f"unknown key '{key}'; {hint}"


def read_text(path: str | Path, thing: str) -> str:
    """The text of a file; ``thing`` names the kind of file in error messages."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput(f"{thing} '{path}' does not exist; check the path") from None
    except IsADirectoryError:
        raise BadInput(f"{thing} '{path}' is a directory; name a file in it") from None
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{thing} '{path}' is not text (byte {error.start} is not UTF-8); name a {thing} file"
        ) from None
    except OSError as error:
        raise BadInput(
            f"{thing} '{path}' cannot be read: {error.strerror}; name a file that can"
        ) from None
    except ValueError:
        raise BadInput(f"{thing} {str(path)!r} is no name that a file can have") from None


def parse_json(text: str, path: str | Path, thing: str) -> Json:
    """Return the value of a JSON text."""
    with refused_in_one_line("JSON", path, thing):
        return json.loads(text, object_pairs_hook=object_of)


def parse_toml(text: str, path: str | Path, thing: str) -> dict[str, object]:
    """Return the table of a TOML text."""
    with refused_in_one_line("TOML", path, thing):
        return tomllib.loads(text)


@contextmanager
def refused_in_one_line(form: str, path: str | Path, thing: str) -> Generator[None]:
    """Raise errors of a parser in the block as `BadInput` with their reason."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{thing} '{path}' is not valid {form}: {error}; correct it") from None


def object_of(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """A JSON object; raises ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        count = Counter(key for key, _ in pairs)
        twice = next(key for key, _ in pairs if count[key] > 1)
        raise ValueError(f"the key {shown(twice)} stands twice in one object")
    return found


def read_config(place: str | Path) -> dict[str, Json]:
    """The table of a configuration of transformers: a file, or a directory with its config.json."""
    file = Path(place) / "config.json" if Path(place).is_dir() else Path(place)
    found = parse_json(read_text(file, "config"), file, "config")
    if not isinstance(found, dict):
        raise BadInput(f"config '{file}' is no table; name a config.json of transformers")
    return found


def check_document(kind: type[T], data: object, path: str | Path) -> T:
    """``data`` as a checked ``kind``: an `Entry` or a `Table`."""
    with in_one_line(f"{path}: "):
        return adapter_of(kind).validate_python(data)


@cache
def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    """The adapter with which pydantic reads a kind."""
    return TypeAdapter(kind)


@contextmanager
def in_one_line(whose: str = "") -> Generator[None]:
    """Raise pydantic's errors in the block as `BadInput`, one line that begins with ``whose``."""
    try:
        yield
    except BadInput as error:
        raise (BadInput(f"{whose}{error}") if whose else error) from None
    except ValidationError as error:
        problems = error.errors()
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise BadInput(f"{whose}{problem_in_words(problems[0])}{more}") from None


def read_document(entry: type[T], path: str | Path, thing: str) -> T:
    """The document at ``path``: TOML if its name ends with ``.toml``, else JSON."""
    text = read_text(path, thing)
    is_toml = str(path).endswith(".toml")
    data = parse_toml(text, path, thing) if is_toml else parse_json(text, path, thing)
    return check_document(entry, data, path)


def problem_in_words(problem: ErrorDetails) -> str:
    """One problem found by pydantic, in a line: the place, the value, what is allowed."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
    place = place.lstrip(".").removesuffix(".[key]")
    match problem["type"]:
        case "unknown_key":
            return f"{place}: {problem['msg']}" if place else problem["msg"]
        case "missing":
            return f"key '{place}' is missing; add it"
        case "model_type" | "dataclass_type" | "model_attributes_type":
            return f"{place or 'the document'} is {shown(problem['input'])}; it must be a table"
        case "greater_than_equal" | "less_than_equal" | "greater_than" | "less_than" as kind:
            ((_, limit),) = problem.get("ctx", {}).items()
            return f"{place} is {shown(problem['input'])}; it must be {SIGNS[kind]} {limit}"
        case _:
            # A document has lists; what reads them may keep them in tuples.
            hint = problem["msg"].removeprefix("Value error, ").replace("tuple", "list")
            return f"{place} is {shown(problem['input'])}; {hint[:1].lower()}{hint[1:]}"


def shown(value: object) -> str:
    """A value as shown in error messages: short, on one line."""
    return shorter(repr(value))


def shorter(text: str) -> str:
    """A text, shortened if it is long."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def json_text(document: Mapping[str, object]) -> str:
    """A JSON object for people to read and edit: a line for each key, and for each item of a list.

    >>> print(json_text({"name": "a", "stages": [{"layers": [0, 2]}, {"layers": [2, 3]}]}), end="")
    {
      "name": "a",
      "stages": [
        {"layers": [0, 2]},
        {"layers": [2, 3]}
      ]
    }
    """
    lines: list[str] = []
    for key, value in document.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = cast("list[object]", value)
            rows = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in items)
            text = f"[\n{rows}\n  ]"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """A table with a column for each key that has plain values; lists of them have spaces between.

    >>> csv_text([{"stage": 0, "devices": [0, 1], "more": {}}, {"stage": 1, "fits": True}])
    'stage,devices,fits\\n0,0 1,\\n1,,True\\n'
    """
    texts = ({key: plain_text(value) for key, value in row.items()} for row in rows)
    plain = [{key: text for key, text in row.items() if text is not None} for row in texts]
    columns = list(dict.fromkeys(key for row in plain for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return text.getvalue()


def plain_text(value: object) -> str | None:
    """A number, a text, a truth value, None, or a list of these, as the text of a cell."""
    if isinstance(value, list | tuple):
        cells = list(map(plain_text, cast(Sequence[object], value)))
        texts = [cell for cell in cells if cell is not None]
        return " ".join(texts) if len(texts) == len(cells) else None
    if value is None:
        return ""
    return str(value) if isinstance(value, str | int | float) else None


def check_place(path: str | Path) -> None:
    """Raise if no file can be written, before any work is done."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot write {str(path)!r}: {error}; name another place") from None
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise BadInput(f"cannot write '{path}': it is a directory; name a file in it")
    if target.exists() and not target.is_file() and os.access(target, os.W_OK):
        return
    folder = target.parent if Path(path).is_symlink() else Path(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "may not be written to" if folder.is_dir() else "does not exist"
        raise BadInput(f"cannot write '{path}': folder '{folder}' {reason}; name another place")


def check_folder(path: str | Path) -> None:
    """Raise if a folder can neither be written to nor be made, before any work is done."""
    target = Path(os.path.realpath(path))
    there = next((place for place in (target, *target.parents) if place.exists()), target)
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "may not be written to" if there.is_dir() else "is no folder"
        raise BadInput(f"cannot write to folder '{path}': '{there}' {reason}; name another place")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file completely or not at all, as `write_pieces` does."""
    write_pieces(path, (text.encode("utf-8"),))


def write_pieces(path: str | Path, pieces: Iterable[bytes]) -> None:
    """Write a file completely or not at all, piece by piece: a reader never sees a part of it.

    The file is written under another name in the same folder and renamed. A symbolic link is kept,
    and its target written. Anything but a regular file (a device, a pipe) is written in place.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                file.writelines(pieces)
        else:
            replace_file(target, pieces)
    except OSError as error:
        raise BadInput(f"cannot write '{path}': {error.strerror}; name another place") from None
    except ValueError:
        raise BadInput(f"cannot write {str(path)!r}: it is no name that a file can have") from None


def replace_file(target: Path, pieces: Iterable[bytes]) -> None:
    """Write a regular file under another name in the same folder, then rename it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(pieces)
        os.replace(partial, target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
