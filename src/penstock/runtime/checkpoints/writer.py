"""Writes checkpoints, on all ranks at once and optionally while training continues.

Every rank writes its own file, then a receipt with the file's size and checksum. When rank 0 has
found the receipts of all ranks, it writes ``state.json`` and gives the directory its final name.
"""

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from penstock.document import write_text
from penstock.errors import BadInput
from penstock.runtime.checkpoints.checkpoint import (
    STATE_FILE,
    checksum_of_file,
    complete_in,
    state_text,
)
from penstock.runtime.processes.world import World
from penstock.runtime.weights.safetensors_file import write_tensors

__all__ = ["CheckpointTarget", "CheckpointWriter", "commit", "make_durable"]

LOOK_EVERY_S = 0.05

ABANDONED = "abandoned-"
"""Begins the name of a checkpoint of a later step than the one that was loaded and went on."""


@dataclass(frozen=True)
class CheckpointTarget:
    """Where a checkpoint is written, what its ``state.json`` holds, how many are kept.

    Raises:
        BadInput: none is to be kept.
    """

    directory: Path
    step: int
    state: Mapping[str, Any]
    keep: int

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise BadInput(f"keep is {self.keep}; it must be >= 1, the checkpoint that is written")

    @property
    def final(self) -> Path:
        """The path of the complete checkpoint."""
        return self.directory / f"step-{self.step:08d}"

    @property
    def partial(self) -> Path:
        """The path of the checkpoint while it is written."""
        return self.directory / f".step-{self.step:08d}.partial"


class CheckpointWriter:
    """Writes one checkpoint at a time; all ranks of ``world`` must make the same calls."""

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
        written from there while training continues.

        Raises:
            BadInput: the directory cannot be written, or writing the previous checkpoint failed.
        """
        self.wait()
        self._world.done_by_first(partial(begin, target))
        kept = tensors if wait else {name: held_apart(t) for name, t in tensors.items()}
        self._target, self._problem = target, ""
        self._stop_looking.clear()
        self._thread = Thread(target=self._write, args=(target, kept), name="penstock-checkpoint")
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint being written is complete; all ranks must call this.

        Raises:
            BadInput: it could not be written, on this rank or another.
        """
        target = self._target
        if target is None:
            return
        self._target = None
        self._own_part_written()
        self._world.agreed(self._refuse)
        self._world.done_by_first(partial(complete, target, self._world.size))

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
            self._problem = cannot_write(target, cause)


def held_apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in CPU memory, which training does not change."""
    plain = tensor.detach()
    return plain.clone() if plain.device.type == "cpu" else plain.cpu()


def begin(target: CheckpointTarget) -> None:
    """Create the directory to write in; delete what interrupted runs left."""
    try:
        target.directory.mkdir(parents=True, exist_ok=True)
        for left_over in target.directory.glob(".step-*.partial"):
            shutil.rmtree(left_over)
        restore_replaced(target.directory, "step-*")
        target.partial.mkdir()
    except OSError as cause:
        raise BadInput(cannot_write(target, cause)) from cause


def cannot_write(target: CheckpointTarget, cause: Exception) -> str:
    """Why a checkpoint was not written, and what to do."""
    if isinstance(cause, BadInput):
        return str(cause)
    return (
        f"checkpoint '{target.final}' cannot be written ({cause}); free space or name another "
        f"directory"
    )


def file_name(rank: int) -> str:
    """The file that holds a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def write_part(target: CheckpointTarget, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one rank's tensors, and its receipt when they are on disk."""
    path = target.partial / file_name(rank)
    write_tensors(path, tensors)
    synchronise(path)
    size, checksum = checksum_of_file(path)
    text = json.dumps({"bytes": size, "sha256": checksum})
    write_text(receipt_path(target, rank), text)


def receipt_path(target: CheckpointTarget, rank: int) -> Path:
    """The file that marks a rank's part as written."""
    return target.partial / f".rank-{rank:05d}.receipt"


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

    Raises:
        BadInput: it cannot be written, or a rank's part is missing.
    """
    if not target.partial.exists():
        return
    receipts = [receipt(target, rank) for rank in range(ranks)]
    files = {file_name(rank): found for rank, found in enumerate(receipts) if found is not None}
    if len(files) < ranks:
        missing = receipts.index(None)
        raise BadInput(
            f"checkpoint '{target.final}' lacks the part of rank {missing}: rank 0 does not see "
            f"what it wrote; name a directory that all hosts share"
        )
    text = state_text(target.step, target.state, files)
    try:
        for rank in range(ranks):
            receipt_path(target, rank).unlink()
        (target.partial / STATE_FILE).write_text(text, encoding="utf-8")
        abandon_later(target)
        commit(target.partial, target.final)
        for outdated in complete_in(target.directory)[: -target.keep]:
            shutil.rmtree(outdated)
    except OSError as cause:
        raise BadInput(cannot_write(target, cause)) from cause


def abandon_later(target: CheckpointTarget) -> None:
    """Rename complete checkpoints of later steps, which would be taken for the newest."""
    for later in complete_in(target.directory):
        if later.name > target.final.name:
            abandoned = later.with_name(f"{ABANDONED}{later.name}")
            if abandoned.exists():
                shutil.rmtree(abandoned)
            later.rename(abandoned)


REPLACED = ".replaced"
"""Ends the name of a directory whose place another is about to take."""


def commit(part: Path, final: Path) -> None:
    """Rename the directory ``part`` to ``final``, which another may have.

    The other one is deleted when ``part`` has its name. Until then one of both is there under the
    name, or with `REPLACED` behind it.

    Raises:
        OSError: something cannot be written.
    """
    make_durable(part)
    old = final.with_name(final.name + REPLACED)
    if final.exists():
        final.rename(old)
    part.rename(final)
    synchronise(final.parent)
    if old.exists():
        shutil.rmtree(old)


def restore_replaced(directory: Path, pattern: str) -> None:
    """Finish what an interrupted `commit` has left in ``directory``."""
    for old in directory.glob(pattern + REPLACED):
        final = old.with_name(old.name.removesuffix(REPLACED))
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)


def make_durable(directory: Path) -> None:
    """Flush a directory and its files to disk."""
    for path in directory.iterdir():
        synchronise(path)
    synchronise(directory)


def synchronise(path: Path) -> None:
    """Flush one file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
