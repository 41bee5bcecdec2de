"""Sends the rows of a run to the process of a tracker, without ever waiting for it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from penstock.errors import shortened
from penstock.runtime.tracking.tracked_run import TrackedRun
from penstock.runtime.tracking.tracker_process import END

__all__ = ["FINISH_S", "RowSender"]

FINISH_S = 20.0
"""How long the end of a run waits until a tracker has taken the last rows."""

MOST_UNSENT_BYTES = 1 << 24
"""A tracker's process reads at once; one that has left so much unread was stopped."""

LONGEST_CAUSE = 200
"""The most characters of a library's error in a message."""


class RowSender:
    """The process of one tracker, as rank 0 sees it.

    A tracker that fails is left out, which ``say`` prints once; the run goes on. What the library
    prints is in ``<directory>/<tracker>.log``.
    """

    def __init__(self, tracker: str, run: TrackedRun, say: Callable[[str], None]) -> None:
        self._tracker, self._say = tracker, say
        self._log = Path(run.directory).absolute() / f"{tracker}.log"
        self._unsent = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._start()
        except OSError as failure:
            self._leave_out(f"cannot be started ({failure})")
        else:
            told = asdict(run) | {"directory": str(self._log.parent)}
            self.send({"tracker": tracker, **told})

    def _start(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
        with self._log.open("wb") as printed:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.runtime.tracking.tracker_process"],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=os.environ | {"PYTHONPATH": path},
                # Ctrl-C is for the run; the tracker ends when its input ends.
                start_new_session=True,
            )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def send(self, row: Mapping[str, object]) -> None:
        """Send a row with its step; does nothing for a tracker that was left out."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._unsent += f"{json.dumps(row, default=str)}\n".encode()
        try:
            taken = self._process.stdin.write(self._unsent) or 0
        except OSError:
            self._leave_out(f"has failed ({self._cause()})")
            return
        del self._unsent[:taken]
        if len(self._unsent) > MOST_UNSENT_BYTES:
            self._leave_out("takes no more values")

    def close(self) -> None:
        """Send what is left, and wait at most `FINISH_S` until the tracker has finished."""
        if self._process is None:
            return
        try:
            self._process.communicate(bytes(self._unsent) + END.encode(), FINISH_S)
        except subprocess.TimeoutExpired:
            self._leave_out(f"has not taken the last values within {FINISH_S:.0f} s")
            return
        if self._process.returncode:
            self._leave_out(f"has failed ({self._cause()})")
        self._process = None

    def _cause(self) -> str:
        """The last line that the process has printed."""
        with suppress(OSError):
            lines = self._log.read_text("utf-8", "replace").strip().splitlines()
            return shortened(lines[-1], LONGEST_CAUSE) if lines else "without a word"
        return f"'{self._log}' cannot be read"

    def _leave_out(self, why: str) -> None:
        self._say(f"tracker '{self._tracker}' {why}; the run goes on without it; see '{self._log}'")
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
