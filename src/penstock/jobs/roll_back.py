"""Goes back to the last checkpoint after a step whose loss or gradients are not finite."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import BadInput, LossNotFinite
from penstock.runtime.pipeline import Pipeline

__all__ = ["MOST_TO_ONE_CHECKPOINT", "RollBack"]

MOST_TO_ONE_CHECKPOINT = 3
"""A run that has gone back to one checkpoint so many times ends at the next bad step."""


@dataclass
class RollBack:
    """The steps that a run leaves out, because they were bad before it went back.

    ``checkpoints`` is the directory of checkpoints. ``tell`` is called after the run has gone back,
    with the step of the checkpoint and what happened.
    """

    pipe: Pipeline
    checkpoints: Path
    tell: Callable[[int, str], None]
    left_out: set[int] = field(default_factory=set[int])
    _times: Counter[int] = field(default_factory=Counter[int])

    def after(self, failure: LossNotFinite) -> int:
        """Load the last checkpoint and return its step; all ranks must call this.

        Raises:
            LossNotFinite: there is no checkpoint, or the run has gone back to it too often.
        """
        try:
            start = self.pipe.load(self.checkpoints)
        except BadInput as none:
            raise failure.at(f"the run cannot go back to a checkpoint ({none})") from None
        if self._times[start] == MOST_TO_ONE_CHECKPOINT:
            raise failure.at(
                f"the run has gone back to step {start} {MOST_TO_ONE_CHECKPOINT} times already"
            )
        self._times[start] += 1
        self.left_out.add(failure.step)
        self.tell(start, f"{failure}; back to step {start}, without the batch of {failure.step}")
        return start
