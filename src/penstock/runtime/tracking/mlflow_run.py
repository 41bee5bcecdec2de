"""A run on MLflow."""

import os
from collections.abc import Mapping
from importlib import import_module

from penstock.runtime.tracking.tracked_run import TrackedRun

__all__ = ["MlflowRun"]


class MlflowRun:
    """See `Tracker`. MLFLOW_TRACKING_URI says where, as everywhere in MLflow."""

    def __init__(self, run: TrackedRun, run_id: str) -> None:
        self._mlflow = import_module("mlflow")
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project)
        if run_id:
            self.run_id = run_id
            self._mlflow.start_run(run_id=run_id)
            return
        self.run_id = str(self._mlflow.start_run(run_name=run.name).info.run_id)
        # MLflow refuses to change a parameter, so a run that goes on keeps its first ones.
        self._mlflow.log_params(dict(run.config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self) -> None:
        """See `Tracker`."""
        self._mlflow.end_run()
