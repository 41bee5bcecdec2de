"""Arguments of `Pipeline` and variables that were once, each with what to use instead."""

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from penstock.errors import BadInput

__all__ = ["REMOVED_ARGUMENTS", "REMOVED_VARIABLES", "check_variables", "without_removed"]

P = ParamSpec("P")
R = TypeVar("R")

IN_GROUPS = {
    "Update": (
        "weights",
        "seed",
        "loss_scaling",
        "optimizer_sync",
        "on_non_finite",
        "prediction_error_every",
    ),
    "Safety": ("verify_every", "check_every", "compare_replicas_every", "transport"),
}
"""Arguments of `Pipeline` that are now fields of its groups."""

REMOVED_ARGUMENTS = {
    "allow_pickle": "checkpoints of format 1 are not read any more; load one with the version that "
    "wrote it, and save it as weights with save_pretrained()",
    "gradient_noise": "leave it out; a callback can compare squared norms of gradients itself",
    "callbacks": "give them to the method notify()",
    **{
        name: f"give it to capture_model(..., {name}=...), and what that returns to Pipeline"
        for name in ("compile", "dynamic", "granularity", "other_examples", "tensor_parallel")
    },
    **{
        name: f"write {group.lower()}=penstock.{group}({name}=...)"
        for group, names in IN_GROUPS.items()
        for name in names
    },
}

TRUSTED = "the network is trusted, keep the ports of the ranks to hosts of yours; unset it"
REMOVED_VARIABLES = {"PENSTOCK_SECRET": TRUSTED, "PENSTOCK_SECRET_FILE": TRUSTED}


def check_variables() -> None:
    """Raise `BadInput` for a variable of the environment that has no effect any more."""
    for name in REMOVED_VARIABLES.keys() & os.environ.keys():
        raise BadInput(f"variable {name} has no effect any more: {REMOVED_VARIABLES[name]}")


def without_removed(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function refuse arguments that it had once, in one line."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() & REMOVED_ARGUMENTS.keys():
            raise BadInput(f"{name} is no argument any more: {REMOVED_ARGUMENTS[name]}")
        return function(*args, **kwargs)

    return checked
