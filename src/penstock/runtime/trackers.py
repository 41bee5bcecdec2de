"""Callbacks that show a training on Weights & Biases or MLflow."""

import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeAlias

from penstock.errors import BadInput, shortened
from penstock.files import write_text
from penstock.runtime.callbacks import Callback, Closing, Event
from penstock.runtime.metrics import StepMetrics, evaluation_row, numbers_in, step_row
from penstock.runtime.user_metrics import Evaluation
from penstock.waiting import say

LONGEST_CAUSE = 200
"""The most characters of a library's error in a message."""

Shown: TypeAlias = tuple[str, Callable[[dict[str, float], int], object], Callable[[], object]]
"""A run that was opened: its id there, a function that shows values at a step, one that ends it."""


def wandb_run(run_id: str, project: str, name: str, config: Mapping[str, Any]) -> Shown:
    """Open a run on W&B, whose own environment variables hold: WANDB_MODE, WANDB_ENTITY, ..."""
    own_id = run_id or token_hex(8)
    run = import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT") or project,
        name=name,
        # W&B keeps the settings of a run that continues, and refuses others.
        config=None if run_id else config,
        resume="allow",
        id=own_id,
    )
    return own_id, lambda values, step: run.log(values, step=step), run.finish


def mlflow_run(run_id: str, project: str, name: str, config: Mapping[str, Any]) -> Shown:
    """Open a run on MLflow; MLFLOW_TRACKING_URI says where, as everywhere in MLflow."""
    mlflow = import_module("mlflow")
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or project)
    own_id = str(
        mlflow.start_run(**{"run_id": run_id} if run_id else {"run_name": name}).info.run_id
    )
    if not run_id:
        # MLflow refuses to change a parameter, so a run that continues keeps its first ones.
        mlflow.log_params(config)
    return own_id, lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run


TRACKERS = {"wandb": wandb_run, "mlflow": mlflow_run}


def check_trackers(trackers: Iterable[str], whose: str, *, installed: bool = True) -> None:
    """Raise `BadInput` for a tracker that is unknown or not ``installed``."""
    for tracker in trackers:
        if tracker not in TRACKERS:
            raise BadInput(
                f"{whose} names tracker '{tracker}', which is not known; use one of "
                f"{', '.join(TRACKERS)}, or write a callback"
            )
        # A folder of that name, such as W&B leaves where it was run, is no package.
        if installed and getattr(find_spec(tracker), "origin", None) is None:
            raise BadInput(
                f"{whose} names tracker '{tracker}', and the package {tracker} is not "
                f"installed; install it or leave the tracker out"
            )


def track(
    tracker: str,
    directory: Path | str,
    *,
    project: str,
    name: str = "",
    config: Mapping[str, object] | None = None,
    say: Callable[[str], None] = say,
) -> Callback:
    """Return a callback for `Pipeline.notify` that shows each step on ``"wandb"`` or ``"mlflow"``.

        pipe.notify(track("wandb", "runs/mine", project="words", config={"rate": 1e-3}))

    ``project`` is W&B's project or MLflow's experiment, ``name`` that of the run (default: the
    directory's). Values that are no numbers are shown as text. ``directory`` keeps the run's id, so
    a training that resumes with the same directory continues the same run. If the library fails,
    ``say`` gets one line, and the training continues without it.

    Raises:
        BadInput: the tracker is not known, or its package is not installed.
    """
    check_trackers([tracker], "the script")
    folder, plain = Path(directory).absolute(), (str, int, float, bool)
    settings = {k: v if isinstance(v, plain) else str(v) for k, v in (config or {}).items()}
    run: list[Shown] = []
    failed = False

    def show(row: dict[str, Any] | None) -> None:
        nonlocal failed
        try:
            if row is not None and not run:
                kept = folder / f"{tracker}.id"
                folder.mkdir(parents=True, exist_ok=True)
                before = kept.read_text("utf-8").strip() if kept.exists() else ""
                run.append(TRACKERS[tracker](before, project, name or folder.name, settings))
                write_text(kept, f"{run[0][0]}\n")
            if row is not None:
                run[0][1](row, row.pop("step"))
            elif run:
                run.pop()[2]()
        except Exception as failure:
            failed = True
            cause = shortened(str(failure).strip().partition("\n")[0], LONGEST_CAUSE)
            say(
                f"tracker '{tracker}' has failed ({type(failure).__name__}: {cause}); the run "
                f"continues without it"
            )

    evaluations: list[Evaluation] = []

    def follow(pipe: Any, event: Event) -> None:
        if pipe.rank != 0 or failed:
            return
        if isinstance(event, Evaluation):
            evaluations.append(event)
        elif isinstance(event, StepMetrics | Closing):
            if evaluations:
                at = event.step - 1 if isinstance(event, StepMetrics) else event.step
                show(evaluation_row(at, Evaluation.combined(evaluations)))
                evaluations.clear()
            is_step = isinstance(event, StepMetrics)
            show({"step": event.step, **numbers_in(step_row(event))} if is_step else None)

    return follow
