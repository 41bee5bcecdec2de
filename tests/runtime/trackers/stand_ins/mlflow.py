"""Stands in for MLflow: the signatures that Penstock calls, with a file for a server."""

from types import SimpleNamespace
from typing import Any

from wandb import tell, trouble_at

STATE: dict[str, Any] = {}


def set_experiment(experiment_name: str | None = None) -> None:
    STATE["experiment"] = experiment_name


def start_run(run_id: str | None = None, run_name: str | None = None) -> SimpleNamespace:
    trouble_at("init")
    tell("init", project=STATE["experiment"], name=run_name, id=run_id or "made-by-mlflow")
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "made-by-mlflow"))


def log_params(params: dict[str, Any]) -> None:
    tell("params", config=params)


def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
    trouble_at("log")
    tell("log", step=step, values=metrics)


def end_run(status: str = "FINISHED") -> None:
    trouble_at("finish")
    tell("finish")
