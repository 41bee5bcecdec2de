"""Checkpoints that any plan can load: tensors under their names in the model, the rest as JSON.

A checkpoint is a directory ``step-00000100``. Every rank writes the tensors that it owns into its
own safetensors file, then a receipt with the file's size and SHA-256 checksum. When rank 0 has
found the receipts of all ranks, it writes ``state.json``, which holds all that is not a tensor, the
receipts and a checksum of itself. Then the directory gets its name. So one named ``step-...`` is
complete, and damage that it takes later shows in its checksums. Reading executes no code.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, StringConstraints

from penstock.device import pieces_on_host
from penstock.errors import BadInput
from penstock.files import Entry, check_document, write_text
from penstock.machine import free_host_memory
from penstock.runtime.checkpoints.folders import NewFolder, restore_replaced, synchronise
from penstock.runtime.processes.world import World
from penstock.runtime.weights.safetensors_file import StoredTensor, read_header, write_tensors
from penstock.text import size_text

STATE_FILE = "state.json"
SCHEMA = 2
LOOK_EVERY_S = 0.05

ABANDONED = "abandoned-"
"""Prefix of the name of a checkpoint of a later step than the one from which a run continued."""


class Ignoring(Entry):
    """A table whose other keys are read elsewhere."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True, strict=True)


class FileEntry(Ignoring):
    bytes: int
    sha256: str


FileName = Annotated[str, StringConstraints(pattern=r"^[\w-][\w.-]{0,199}$")]
"""A file of the checkpoint's own directory."""


class StateEntry(Ignoring):
    step: int
    files: dict[FileName, FileEntry]


def state_text(step: int, state: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of ``state.json``. ``files`` gives ``bytes`` and ``sha256`` of every other file."""
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


def tensors_in_checkpoint(path: Path, state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Find every tensor of a checkpoint, by name, without reading its values."""
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


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a checkpoint, and not one of several."""
    return (path / STATE_FILE).is_file()


def latest_checkpoint(directory: Path) -> Path:
    """The newest complete checkpoint in ``directory``. Its checksums are not verified."""
    return checkpoints_in(directory)[-1]


def checkpoints_in(directory: Path) -> Sequence[Path]:
    """Complete checkpoints, oldest first; at least one."""
    found = complete_in(directory)
    if not found:
        raise BadInput(f"no checkpoint in '{directory}'; name the directory of a run with one")
    return found


def complete_in(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first; possibly none."""
    found = sorted(path for path in directory.glob("step-*") if is_checkpoint(path))
    # One that was about to be replaced counts only where the new one has not come.
    return [path for path in found if not (path.suffix and path.with_suffix("") in found)]


@dataclass(frozen=True)
class CheckpointTarget:
    """Directory of a checkpoint, contents of its ``state.json``, and the number that is kept."""

    directory: Path
    step: int
    state: Mapping[str, Any]
    keep: int

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise BadInput(f"keep is {self.keep}; it must be >= 1, the checkpoint that is written")

    @property
    def folder(self) -> NewFolder:
        """The folder of the checkpoint, while it is written and then."""
        final = self.directory / f"step-{self.step:08d}"
        return NewFolder(f"checkpoint '{final}'", final)


class CheckpointWriter:
    """Writer of one checkpoint at a time; all ranks of ``world`` must make the same calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._target: CheckpointTarget | None = None
        self._thread: Thread | None = None
        self._stop_looking = Event()
        self._problem = ""

    def save(
        self, target: CheckpointTarget, tensors: Mapping[str, torch.Tensor], *, wait: bool
    ) -> None:
        """Write a checkpoint with this rank's ``tensors`` and rank 0's ``target.state``.

        With ``wait`` it is complete on return. Otherwise the tensors are copied to CPU memory and
        written from there while training continues; where that has no room for them, this waits.
        """
        self.wait()
        self._world.on_first(partial(begin, target))
        wait = wait or not self._have_room(target, tensors)
        kept = tensors if wait else {name: held_apart(t) for name, t in tensors.items()}
        self._target, self._problem = target, ""
        self._stop_looking.clear()
        self._thread = Thread(target=self._write, args=(target, kept), name="penstock-checkpoint")
        self._thread.start()
        if wait:
            self.wait()

    def _have_room(self, target: CheckpointTarget, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether every host has memory for its ranks' tensors; all ranks must call this."""
        own = float(sum(tensor.nbytes for tensor in tensors.values()))
        of_all = self._world.all_gather((own, free_host_memory().bytes))
        for host in dict.fromkeys(self._world.hosts):
            of_host = [of for of, at in zip(of_all, self._world.hosts, strict=True) if at == host]
            wanted, free = sum(size for size, _ in of_host), min(free for _, free in of_host)
            if wanted > free:
                if self._world.rank == 0:
                    warnings.warn(
                        f"checkpoint '{target.folder.final}' is written before the training goes "
                        f"on: a copy of its tensors takes {size_text(wanted)} on host {host}, "
                        f"which has {size_text(free)} free",
                        stacklevel=2,
                    )
                return False
        return True

    def wait(self) -> None:
        """Wait until the checkpoint being written is complete; all ranks must call this."""
        target = self._target
        if target is None:
            return
        self._target = None
        self._own_part_written()
        self._world.all_succeed(self._refuse)
        self._world.on_first(partial(complete, target, self._world.size))

    def close(self, *, failed: bool) -> None:
        """Finish the checkpoint being written, without communication with other ranks.

        After a failure it does not wait for their parts.
        """
        if self._thread is None:
            return
        if not failed:
            self._thread.join(self._world.timeout_s)
        self._own_part_written()
        if self._problem:
            warnings.warn(self._problem, stacklevel=2)

    def _own_part_written(self) -> None:
        self._stop_looking.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def _refuse(self) -> None:
        if self._problem:
            raise BadInput(self._problem)

    def _write(self, target: CheckpointTarget, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write this rank's part. Rank 0 completes the checkpoint when all parts are there."""
        try:
            write_part(target, self._world.rank, tensors)
            if self._world.rank == 0:
                while not self._stop_looking.is_set():
                    if all(receipt(target, rank) for rank in range(self._world.size)):
                        complete(target, self._world.size)
                        break
                    self._stop_looking.wait(LOOK_EVERY_S)
        except (BadInput, OSError, RuntimeError, MemoryError) as cause:
            self._problem = target.folder.refusal(cause)


def held_apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in CPU memory, which training does not change."""
    found = torch.empty(tensor.shape, dtype=tensor.dtype)
    left = found.view(-1).view(torch.uint8)
    for piece in pieces_on_host(tensor):
        left[: len(piece)] = piece
        left = left[len(piece) :]
    return found


def begin(target: CheckpointTarget) -> None:
    """Create the folder to write in; delete what interrupted runs left."""
    folder = target.folder
    with folder.refusing():
        for left_over in target.directory.glob(".step-*.partial"):
            shutil.rmtree(left_over)
        restore_replaced(target.directory, "step-*")
    folder.begin()


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_part(target: CheckpointTarget, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one rank's tensors, and its receipt when they are on disk."""
    path = target.folder.partial / file_name(rank)
    write_tensors(path, tensors)
    synchronise(path)
    size, checksum = checksum_of_file(path)
    text = json.dumps({"bytes": size, "sha256": checksum})
    write_text(receipt_path(target, rank), text)


def receipt_path(target: CheckpointTarget, rank: int) -> Path:
    """The file that marks a rank's part as written."""
    return target.folder.partial / f".rank-{rank:05d}.receipt"


def receipt(target: CheckpointTarget, rank: int) -> Mapping[str, Any] | None:
    """Size and checksum of a rank's file; ``None`` until it is written."""
    try:
        return json.loads(receipt_path(target, rank).read_text())
    except (OSError, ValueError):
        return None


def complete(target: CheckpointTarget, ranks: int) -> None:
    """Write ``state.json``, give the directory its final name, and delete the oldest checkpoints.

    Checkpoints of later steps are of a course that this one has left, and get another name. Does
    nothing if the checkpoint is complete already.
    """
    folder = target.folder
    if not folder.partial.exists():
        return
    receipts = [receipt(target, rank) for rank in range(ranks)]
    files = {file_name(rank): found for rank, found in enumerate(receipts) if found is not None}
    if len(files) < ranks:
        missing = receipts.index(None)
        raise BadInput(
            f"{folder.what} lacks the part of rank {missing}: rank 0 does not see "
            f"what it wrote; name a directory that all hosts share"
        )
    text = state_text(target.step, target.state, files)
    with folder.refusing():
        for rank in range(ranks):
            receipt_path(target, rank).unlink()
        (folder.partial / STATE_FILE).write_text(text, encoding="utf-8")
        abandon_later(target)
        folder.complete()
        for outdated in complete_in(target.directory)[: -target.keep]:
            shutil.rmtree(outdated)


def abandon_later(target: CheckpointTarget) -> None:
    """Rename complete checkpoints of later steps, which would be taken for the newest."""
    for later in complete_in(target.directory):
        if later.name > target.folder.final.name:
            abandoned = later.with_name(f"{ABANDONED}{later.name}")
            if abandoned.exists():
                shutil.rmtree(abandoned)
            later.rename(abandoned)
