"""Folders that are complete once they have their name: written under another one, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import BadInput

REPLACED = ".replaced"
"""Suffix of the name of a directory whose place another is about to take."""


@dataclass(frozen=True)
class NewFolder:
    """A folder to be written; ``what`` names it in error messages."""

    what: str
    final: Path

    @property
    def partial(self) -> Path:
        """Its path until it is complete."""
        return self.final.with_name(f".{self.final.name}.partial")

    def begin(self) -> None:
        """Create it, empty, under its first name."""
        with self.refusing():
            self.final.parent.mkdir(parents=True, exist_ok=True)
            if self.partial.exists():
                shutil.rmtree(self.partial)
            self.partial.mkdir()

    def complete(self, last: str = "") -> None:
        """Give it its final name, which another folder may have.

        The other one is deleted when this one has its name. Until then one of both is there under
        the name, or with `REPLACED` behind it. With ``last`` the files are moved into the other one
        instead, that of this name last.
        """
        with self.refusing():
            for path in (*self.partial.iterdir(), self.partial):
                synchronise(path)
            if last and self.final.exists():
                for path in sorted(self.partial.iterdir(), key=lambda path: path.name == last):
                    os.replace(path, self.final / path.name)
                self.partial.rmdir()
                return
            old = self.final.with_name(self.final.name + REPLACED)
            if self.final.exists():
                self.final.rename(old)
            self.partial.rename(self.final)
            synchronise(self.final.parent)
            if old.exists():
                shutil.rmtree(old)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Raise `BadInput` in one line for what the system refuses to write."""
        try:
            yield
        except OSError as cause:
            raise BadInput(self.refusal(cause)) from cause

    def refusal(self, cause: Exception) -> str:
        """The reason why it was not written, and the remedy."""
        if isinstance(cause, BadInput):
            return str(cause)
        return f"{self.what} cannot be written ({cause}); free space or name another directory"


def restore_replaced(directory: Path, pattern: str) -> None:
    """Finish what an interrupted `NewFolder.complete` has left in ``directory``."""
    for old in directory.glob(pattern + REPLACED):
        final = old.with_name(old.name.removesuffix(REPLACED))
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)


def synchronise(path: Path) -> None:
    """Flush one file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
