"""The values of a step or an evaluation by name, as records and trackers show them."""

from collections.abc import Mapping
from typing import Any

from penstock.runtime.metrics import StepMetrics
from penstock.runtime.user_metrics import Evaluation

__all__ = ["evaluation_row", "numbers_in", "step_row"]

NO_NUMBERS = ("step", "verified", "lengths", "non_finite")
"""What a row has beside numbers over the steps."""


def step_row(metrics: StepMetrics) -> dict[str, Any]:
    """What is recorded of a step."""
    row: dict[str, Any] = {
        "step": metrics.step,
        "loss": metrics.loss,
        "samples_per_s": metrics.samples_per_s,
        "iteration_s": metrics.seconds,
        "bubble": metrics.bubble,
        "gradient_norm": metrics.gradient_norm,
        "learning_rate": metrics.learning_rate,
        **metrics.metrics,
    }
    if metrics.skipped:
        row |= {"skipped": 1, "gradient_norm": None}
    if metrics.non_finite:
        # JSON has no NaN, and loss, norm and metrics of such a step say nothing.
        row = {"step": metrics.step, "skipped": 1, "non_finite": metrics.non_finite}
    if metrics.loss_scale != 1.0:
        row["loss_scale"] = metrics.loss_scale
    return row


def evaluation_row(step: int, evaluation: Evaluation) -> dict[str, Any]:
    """What is recorded of an evaluation after ``step`` steps."""
    metrics = {f"evaluation_{name}": value for name, value in evaluation.metrics.items()}
    return {"step": step, "evaluation_loss": evaluation.loss, **metrics}


def numbers_in(row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row that can be drawn over the steps."""
    return {
        name: value for name, value in row.items() if name not in NO_NUMBERS and value is not None
    }
