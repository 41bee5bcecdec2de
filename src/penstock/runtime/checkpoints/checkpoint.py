"""Checkpoints that any plan can load: tensors under their names in the model, the rest as JSON.

A checkpoint is a directory ``step-00000100``. Every rank writes the tensors that it owns into its
own safetensors file. ``state.json`` holds all that is not a tensor, the size and the SHA-256
checksum of every file, and a checksum of itself. Reading a checkpoint executes no code.

The directory has another name while it is written and is renamed when complete. So a directory
named ``step-...`` is complete. Damage that it takes later shows in its checksums.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, StringConstraints

from penstock.document import Entry, check_document
from penstock.errors import BadInput
from penstock.runtime.weights.safetensors_file import StoredTensor, read_header, read_into

__all__ = [
    "STATE_FILE",
    "checkpoints_in",
    "checksum_of_file",
    "complete_in",
    "damage_of",
    "first_mismatch",
    "latest_checkpoint",
    "read_state",
    "read_tensors",
    "state_text",
    "stored_tensors",
]

STATE_FILE = "state.json"
SCHEMA = 2


class Ignoring(Entry):
    """A table whose other keys are read elsewhere."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True, strict=True)


class FileEntry(Ignoring):
    """A file of a checkpoint."""

    bytes: int
    sha256: str


FileName = Annotated[str, StringConstraints(pattern=r"^[\w-][\w.-]{0,199}$")]
"""A file of the checkpoint's own directory."""


class StateEntry(Ignoring):
    """What every state has."""

    step: int
    files: dict[FileName, FileEntry]


def state_text(step: int, state: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of ``state.json``. ``files`` gives ``bytes`` and ``sha256`` of every other file.

    Raises:
        BadInput: the state holds a value that JSON cannot express.
    """
    content = {"schema": SCHEMA, "step": step, "files": dict(files), **state}
    try:
        return json.dumps({**content, "sha256": checksum_of(content)}, indent=1)
    except (TypeError, ValueError) as cause:
        raise BadInput(
            f"the state of a checkpoint cannot be written as JSON ({cause}); give extra= numbers, "
            f"text, lists and dictionaries only"
        ) from cause


def checksum_of(content: Mapping[str, Any]) -> str:
    """The SHA-256 checksum of a state that does not contain its checksum yet."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """All of a checkpoint that is not tensors, with its ``step``.

    Raises:
        BadInput: the path is not a complete checkpoint, or ``state.json`` is damaged.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise BadInput(
            f"'{path}' is not a complete checkpoint ({cause}); name a directory step-<number>"
        ) from cause
    schema = state.get("schema") if isinstance(state, dict) else None
    if schema != SCHEMA:
        raise BadInput(
            f"checkpoint '{path}' has format {schema}, this version reads {SCHEMA}; read it with "
            f"the version that wrote it"
        )
    if state.pop("sha256", None) != checksum_of(state):
        raise BadInput(f"{STATE_FILE} of checkpoint '{path}' is damaged: its checksum is wrong")
    check_document(StateEntry, state, path / STATE_FILE)
    return state


def damage_of(path: Path, part: int = 0, parts: int = 1) -> str:
    """Describe what is wrong with a checkpoint; empty if it is undamaged.

    Only every ``parts``-th file is read, starting with number ``part``, so that ranks can share the
    work.
    """
    try:
        state = read_state(path)
    except BadInput as cause:
        return str(cause)
    for name in sorted(state["files"])[part::parts]:
        expected, file = state["files"][name], path / name
        try:
            size, found = checksum_of_file(file)
        except OSError as cause:
            return f"'{file}' cannot be read ({cause.strerror})"
        if size != expected["bytes"]:
            return f"'{file}' has {size} bytes, but {expected['bytes']} were written"
        if found != expected["sha256"]:
            return f"'{file}' is damaged: its checksum is wrong"
    return ""


def checksum_of_file(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 checksum of a file."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256")
        return file.tell(), checksum.hexdigest()


def stored_tensors(path: Path, state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Find every tensor of a checkpoint, by name, without reading its values.

    Raises:
        BadInput: a file is missing or incomplete.
    """
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(state["files"]):
        tensors |= read_header(path / name)
    return tensors


def first_mismatch(
    path: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor]
) -> str:
    """Describe what prevents loading into ``tensors``; empty if nothing does."""
    for name, tensor in tensors.items():
        if name not in stored:
            return (
                f"checkpoint '{path}' has no tensor '{name}'; it was written by another model or "
                f"another optimizer; start without it"
            )
        if stored[name].shape != tuple(tensor.shape):
            return (
                f"tensor '{name}' has shape {stored[name].shape} in checkpoint '{path}' and "
                f"{tuple(tensor.shape)} in the model; build the model as it was when saved"
            )
    return ""


def read_tensors(stored: Mapping[str, StoredTensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill ``tensors`` in place.

    Raises:
        BadInput: a file cannot be read.
    """
    read_into([(stored[name], tensor) for name, tensor in tensors.items()])


def latest_checkpoint(directory: Path) -> Path:
    """The newest complete checkpoint in ``directory``. Its checksums are not verified.

    Raises:
        BadInput: there is none.
    """
    return checkpoints_in(directory)[-1]


def checkpoints_in(directory: Path) -> Sequence[Path]:
    """Complete checkpoints, oldest first; at least one.

    Raises:
        BadInput: there is none.
    """
    found = complete_in(directory)
    if not found:
        raise BadInput(f"no checkpoint in '{directory}'; name the directory of a run with one")
    return found


def complete_in(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first; possibly none."""
    found = sorted(path for path in directory.glob("step-*") if (path / STATE_FILE).is_file())
    # One that was about to be replaced counts only where the new one has not come.
    return [path for path in found if not (path.suffix and path.with_suffix("") in found)]
