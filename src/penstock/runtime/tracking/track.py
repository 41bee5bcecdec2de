"""A callback that shows a training on Weights & Biases or MLflow."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.runtime.callbacks import Callback, Closing, Event
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.tracking.registry import check_installed, check_known
from penstock.runtime.tracking.rows import evaluation_row, numbers_in, step_row
from penstock.runtime.tracking.sending import RowSender
from penstock.runtime.tracking.tracked_run import Config, TrackedRun
from penstock.runtime.user_metrics import Evaluation

__all__ = ["TrackingCallback", "track"]


def track(
    tracker: str,
    directory: Path | str,
    *,
    project: str,
    name: str = "",
    config: Config | None = None,
) -> Callback:
    """A callback for `Pipeline`: rank 0 shows each step on ``"wandb"`` or ``"mlflow"``.

        callbacks=[track("wandb", "runs/mine", project="words", config={"rate": 1e-3})]

    ``project`` is W&B's project or MLflow's experiment, ``name`` that of the run (default: the
    directory's). Evaluations between two steps are combined. ``directory`` keeps the run's id, so a
    training that goes on with the same directory goes on with the same run.

    The library works in a process of its own. If it fails, one line on standard error says so, and
    the training goes on. At the end it has 20 s for the last values.

    Raises:
        BadInput: the tracker is not known, or its package is not installed.
    """
    check_known([tracker], "the script")
    check_installed([tracker], "the script")
    name = name or Path(directory).absolute().name
    return TrackingCallback(tracker, TrackedRun(project, name, str(directory), config or {}))


class TrackingCallback:
    """See `track`; ``say`` prints why a tracker is left out."""

    def __init__(
        self, tracker: str, run: TrackedRun, say: Callable[[str], None] | None = None
    ) -> None:
        self._tracker, self._run, self._say = tracker, run, say or say_on_standard_error
        self._sender: RowSender | None = None
        self._evaluations: list[Evaluation] = []
        self._evaluated_at = 0

    def __call__(self, pipe: Any, event: Event) -> None:
        """Called after each event, on every rank."""
        if pipe.rank != 0:
            return
        if self._sender is None:
            self._sender = RowSender(self._tracker, self._run, self._say)
        if isinstance(event, Evaluation):
            self._evaluations.append(event)
            self._evaluated_at = pipe.steps
            return
        if self._evaluations:
            combined = Evaluation.combined(self._evaluations)
            self._sender.send(evaluation_row(self._evaluated_at, combined))
            self._evaluations.clear()
        if isinstance(event, StepMetrics):
            self._sender.send({"step": event.step, **numbers_in(step_row(event))})
        if isinstance(event, Closing):
            self._sender.close()
            self._sender = None


def say_on_standard_error(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)
