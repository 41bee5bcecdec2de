"""A run on Weights & Biases."""

import os
from collections.abc import Mapping
from importlib import import_module
from secrets import token_hex

from penstock.runtime.tracking.tracked_run import TrackedRun

__all__ = ["WandbRun"]


class WandbRun:
    """See `Tracker`. W&B's own environment variables hold: WANDB_MODE, WANDB_ENTITY, ..."""

    def __init__(self, run: TrackedRun, run_id: str) -> None:
        self.run_id = run_id or token_hex(8)
        self._run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT") or run.project,
            name=run.name,
            # W&B keeps the settings of a run that goes on, and refuses others.
            config=None if run_id else dict(run.config),
            dir=run.directory,
            resume="allow",
            id=self.run_id,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """See `Tracker`."""
        self._run.finish()
