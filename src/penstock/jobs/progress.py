"""What a training run displays: a live line on a terminal, plain lines elsewhere."""

import sys
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.runtime.metrics import StepMetrics

__all__ = ["TrainingDisplay", "display_for", "show_cursor"]

PLAIN_LINES = 20
"""How many lines a run prints if standard error is not a terminal."""

SHOW_CURSOR = "\x1b[?25h"


class TrainingDisplay(Protocol):
    """Displays the state after each step."""

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Step ``step`` has been taken."""
        ...

    def note(self, text: str) -> None:
        """Print a line about something else: an evaluation, a checkpoint."""
        ...

    def close(self) -> None:
        """Restore the terminal."""
        ...


class LiveDisplay:
    """A progress bar that is redrawn in place."""

    def __init__(self, start: int, steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[samples_per_s]:.0f} samples/s"),
            TextColumn("bubble {task.fields[bubble]:.0%}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(
            "train", total=steps, completed=start, loss=float("nan"), samples_per_s=0.0, bubble=0.0
        )
        self._progress.start()

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=step,
            loss=metrics.loss,
            samples_per_s=metrics.samples_per_s,
            bubble=metrics.bubble,
        )

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, highlight=False)

    def close(self) -> None:
        """Stop redrawing and show the cursor again."""
        self._progress.stop()


class PlainDisplay:
    """A line every few steps, for logs; without a ``stream`` nothing."""

    def __init__(self, start: int, steps: int, stream: TextIO | None) -> None:
        self._every = max(1, (steps - start) // PLAIN_LINES)
        self._steps = steps
        self._stream = stream

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Print every few steps, and always the last step."""
        if step % self._every == 0 or step == self._steps:
            self.note(
                f"step {step}/{self._steps}  loss {metrics.loss:.4f}  "
                f"{metrics.samples_per_s:.0f} samples/s  bubble {metrics.bubble:.0%}"
            )

    def note(self, text: str) -> None:
        """Print a line."""
        if self._stream is not None:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to restore."""


def display_for(start: int, steps: int, *, shown: bool) -> TrainingDisplay:
    """The display that suits standard error; none unless ``shown``."""
    if shown and sys.stderr.isatty():
        return LiveDisplay(start, steps)
    return PlainDisplay(start, steps, sys.stderr if shown else None)


def show_cursor() -> None:
    """Show the cursor again, which the live display of a stopped worker left hidden."""
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)
        sys.stderr.flush()
