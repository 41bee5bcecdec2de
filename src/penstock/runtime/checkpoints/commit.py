"""Gives files and directories their final names, once what they hold is on disk."""

import os
import shutil
from pathlib import Path

__all__ = ["REPLACED", "commit", "make_durable", "restore_replaced", "synchronise"]

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
