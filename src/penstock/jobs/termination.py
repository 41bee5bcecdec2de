"""Ends a training as a scheduler asks for it: after the current step, with a checkpoint."""

import signal
from types import FrameType

from penstock.runtime.pipeline import Pipeline

__all__ = ["Termination"]


class Termination:
    """Whether this worker has received SIGTERM, which asks its pipeline to stop after a step.

    Further signals are ignored: a scheduler may send one to every process, and the launcher passes
    its own on. A second one ends the launcher, and with it the workers.
    """

    def __init__(self) -> None:
        self.asked = False
        self._pipe: Pipeline | None = None
        signal.signal(signal.SIGTERM, self._ask)

    def stops(self, pipe: Pipeline) -> None:
        """From now on the signal stops ``pipe``, also one that has come before."""
        self._pipe = pipe
        if self.asked:
            pipe.stop()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.asked = True
        if self._pipe is not None:
            self._pipe.stop()
