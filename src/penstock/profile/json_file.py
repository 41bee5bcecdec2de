"""Read and write model profiles as JSON, one line for each layer."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, ConfigDict

from penstock.files import (
    Entry,
    check_document,
    json_text,
    parse_json,
    read_text,
    version_is,
    write_text,
)
from penstock.profile.model_profile import ModelProfile

VERSION = 2
"""Version of the format, raised whenever the same model gets other layers."""

OLDER = f"since version {VERSION} models have other layers, so profile the model again"

FIRST = ("name", "source", "device", "notes", "batch_size")
"""Keys at the beginning of a file, in this order."""

OFTEN_EMPTY = (
    "device",
    "notes",
    "whole_loss",
    "recomputes",
    "host_step_s_per_byte",
    "other_load",
    "variation",
    "tokens_per_sample",
    "flops_per_sample",
    "by_length",
    "tensor_parallel",
)
"""Keys that are left out where they are empty."""


class Header(Entry):
    """The keys of a file that are not those of the profile."""

    model_config = ConfigDict(extra="ignore")

    format: Literal["penstock-profile"]
    schema_version: Annotated[int, AfterValidator(version_is(VERSION, OLDER))]


def read_profile(path: str | Path) -> ModelProfile:
    """The profile that `write_profile` (or a person) wrote.

    Raises:
        BadInput: no such file, a syntax error, an unknown key or a number out of range.
    """
    return profile_from_json(parse_json(read_text(path, "profile"), path, "profile"), path)


def profile_from_json(data: object, path: str | Path) -> ModelProfile:
    """The profile in a JSON value; ``path`` is used in error messages."""
    check_document(Header, data, path)
    table = cast("Mapping[str, object]", data)
    own = {key: value for key, value in table.items() if key not in Header.model_fields}
    return check_document(ModelProfile, own, path)


def profile_to_json(profile: ModelProfile) -> dict[str, object]:
    """The JSON value of ``profile``; `profile_from_json` restores it exactly."""
    values = asdict(profile)
    for costs in values["by_length"]:
        costs["lengths"] = dict(costs["lengths"])
    if profile.tensor_parallel:
        factors = profile.tensor_parallel.factors
        values["tensor_parallel"]["factors"] = [
            {"ranks": ranks, "factor": factor} for ranks, factor in factors
        ]
    numbers = [key for key, value in values.items() if not isinstance(value, tuple | dict)]
    kept = {
        key: list(values[key]) if isinstance(values[key], tuple) else values[key]
        for key in dict.fromkeys((*FIRST, *numbers, *values))
        if values[key] or key not in OFTEN_EMPTY
    }
    return {"format": "penstock-profile", "schema_version": VERSION, **kept}


def write_profile(profile: ModelProfile, path: str | Path) -> None:
    """Write ``profile``; `read_profile` restores it exactly.

    Raises:
        BadInput: the file cannot be written.
    """
    write_text(path, json_text(profile_to_json(profile)))
