"""Shows a training on Weights & Biases or MLflow, from a thread that takes rows from a queue."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from secrets import token_hex
from typing import Any, TypeAlias

from penstock.document import write_text
from penstock.errors import BadInput, shortened
from penstock.runtime.callbacks import Closing, Event
from penstock.runtime.metrics import StepMetrics, evaluation_row, numbers_in, step_row
from penstock.runtime.user_metrics import Evaluation

__all__ = ["Tracker", "check_trackers", "track"]

FINISH_S = 20.0
"""How long the end of a run waits until a tracker has taken the last rows."""

MOST_WAITING = 1000
"""The most rows that wait for a tracker; those that find no place are lost."""

THREAD = "penstock tracker"

LONGEST_CAUSE = 200
"""The most characters of a library's error in a message."""

Shown: TypeAlias = tuple[str, Callable[[dict[str, float], int], object], Callable[[], object]]
"""A run that was opened: its id there, a function that shows values at a step, one that ends it."""


def wandb_run(tracker: "Tracker", run_id: str) -> Shown:
    """A run on W&B, whose own environment variables hold: WANDB_MODE, WANDB_ENTITY, ..."""
    own_id = run_id or token_hex(8)
    run = import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT") or tracker.project,
        name=tracker.run_name,
        # W&B keeps the settings of a run that goes on, and refuses others.
        config=None if run_id else tracker.config,
        dir=str(tracker.directory),
        resume="allow",
        id=own_id,
    )
    return own_id, lambda values, step: run.log(values, step=step), run.finish


def mlflow_run(tracker: "Tracker", run_id: str) -> Shown:
    """A run on MLflow; MLFLOW_TRACKING_URI says where, as everywhere in MLflow."""
    mlflow = import_module("mlflow")
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or tracker.project)
    named = {"run_id": run_id} if run_id else {"run_name": tracker.run_name}
    own_id = str(mlflow.start_run(**named).info.run_id)
    if not run_id:
        # MLflow refuses to change a parameter, so a run that goes on keeps its first ones.
        mlflow.log_params(tracker.config)
    return own_id, lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run


TRACKERS = {"wandb": wandb_run, "mlflow": mlflow_run}


def check_trackers(trackers: Iterable[str], whose: str, *, installed: bool = True) -> None:
    """Raise `BadInput` for a tracker that is not known or not ``installed``; ``whose`` asks."""
    for tracker in trackers:
        if tracker not in TRACKERS:
            raise BadInput(
                f"{whose} asks for tracker '{tracker}', which is not known; use one of "
                f"{', '.join(TRACKERS)}, or write a callback"
            )
        # A folder of that name, such as W&B leaves where it was run, is no package.
        if installed and getattr(find_spec(tracker), "origin", None) is None:
            raise BadInput(
                f"{whose} asks for tracker '{tracker}', and the package {tracker} is not "
                f"installed; install it or leave the tracker out"
            )


def track(
    tracker: str,
    directory: Path | str,
    *,
    project: str,
    name: str = "",
    config: Mapping[str, object] | None = None,
) -> "Tracker":
    """A callback for `Pipeline`: rank 0 shows each step on ``"wandb"`` or ``"mlflow"``.

        callbacks=[track("wandb", "runs/mine", project="words", config={"rate": 1e-3})]

    ``project`` is W&B's project or MLflow's experiment, ``name`` that of the run (default: the
    directory's). Evaluations between two steps are combined. ``directory`` keeps the run's id, so a
    training that goes on with the same directory goes on with the same run.

    The library works in a thread. If it fails, or is so slow that rows are lost, one line on
    standard error says so, and the training goes on. At the end it has 20 s for the last values.

    Raises:
        BadInput: the tracker is not known, or its package is not installed.
    """
    check_trackers([tracker], "the script")
    return Tracker(tracker, Path(directory), project, name, config or {})


class Tracker:
    """See `track`; ``say`` prints what goes wrong. Values that are no numbers are shown as text."""

    def __init__(
        self,
        tracker: str,
        directory: Path,
        project: str,
        run_name: str,
        config: Mapping[str, object],
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self.directory, self.project = directory.absolute(), project
        self.run_name = run_name or self.directory.name
        plain = (str, int, float, bool)
        self.config = {k: v if isinstance(v, plain) else str(v) for k, v in config.items()}
        self._tracker, self._say, self._lost, self._failed = tracker, say, 0, False
        self._rows = Queue[dict[str, Any] | None](MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._evaluations: list[Evaluation] = []
        self._evaluated_at = 0

    def __call__(self, pipe: Any, event: Event) -> None:
        """Called after each event, on every rank."""
        if pipe.rank != 0:
            return
        if isinstance(event, Evaluation):
            self._evaluations.append(event)
            self._evaluated_at = pipe.steps
            return
        if self._evaluations:
            self.send(evaluation_row(self._evaluated_at, Evaluation.combined(self._evaluations)))
            self._evaluations.clear()
        if isinstance(event, StepMetrics):
            self.send({"step": event.step, **numbers_in(step_row(event))})
        if isinstance(event, Closing):
            self.close()

    def send(self, row: dict[str, Any]) -> None:
        """Give the thread a row with its step; never waits."""
        if self._failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._show, name=THREAD, daemon=True)
            self._thread.start()
        try:
            self._rows.put_nowait(row)
        except Full:
            self._lost += 1
            if self._lost == 1:
                self._say(
                    f"tracker '{self._tracker}' is slower than the training: {MOST_WAITING} rows "
                    f"wait for it, and those from step {row['step']} on are lost until it catches "
                    f"up; the run goes on"
                )

    def close(self) -> None:
        """Wait at most `FINISH_S` until the tracker has taken the last rows and has finished."""
        thread, self._thread = self._thread, None
        if thread is None or self._failed:
            return
        if self._lost:
            self._say(f"tracker '{self._tracker}' has lost {self._lost} rows")
        try:
            self._rows.put(None, timeout=FINISH_S)
        except Full:
            pass
        else:
            thread.join(FINISH_S)
        if thread.is_alive():
            self._say(
                f"tracker '{self._tracker}' has not taken the last values within {FINISH_S:.0f} s; "
                f"the run ends without them"
            )

    def _show(self) -> None:
        """Show all rows, as they come; the run's id is kept, and a run that has one goes on."""
        try:
            kept = self.directory / f"{self._tracker}.id"
            self.directory.mkdir(parents=True, exist_ok=True)
            before = kept.read_text("utf-8").strip() if kept.exists() else ""
            run_id, log, finish = TRACKERS[self._tracker](self, before)
            write_text(kept, f"{run_id}\n")
            while row := self._rows.get():
                log(row, row.pop("step"))
            finish()
        except BaseException as failure:
            cause = str(failure).strip().partition("\n")[0]
            self._say(
                f"tracker '{self._tracker}' has failed "
                f"({type(failure).__name__}: {shortened(cause, LONGEST_CAUSE)}); the run goes on "
                f"without it"
            )
            self._failed = True
