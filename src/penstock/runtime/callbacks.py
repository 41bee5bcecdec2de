"""Callbacks: functions of the user that are called on events of a pipeline.

    def show(pipe, event):
        match event:
            case StepMetrics(): ...
            case Evaluation(): ...

Every rank calls its callbacks, with equal events, in the order of the list.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from penstock.errors import BadInput
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.user_metrics import Evaluation

__all__ = ["Callback", "Closing", "Event", "Saved", "check_callbacks"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was written completely after ``step`` steps."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Closing:
    """The pipeline is about to be closed after ``step`` steps. It can still be used."""

    step: int


Event: TypeAlias = StepMetrics | Evaluation | Saved | Closing
"""After a step, after an evaluation, after a checkpoint, before closing."""

Callback: TypeAlias = Callable[[Any, Event], object]
"""``callback(pipe, event)``: its result is ignored, an exception ends the training."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise `BadInput` if a callback cannot be called."""
    for place, callback in enumerate(callbacks):
        if not callable(callback):
            raise BadInput(
                f"callback {place} is a {type(callback).__name__}; give functions "
                f"callback(pipe, event)"
            )
