"""The trackers by name, which is also that of their package."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from penstock.errors import BadInput
from penstock.runtime.tracking.mlflow_run import MlflowRun
from penstock.runtime.tracking.tracked_run import Tracker
from penstock.runtime.tracking.wandb_run import WandbRun

__all__ = ["TRACKERS", "check_installed", "check_known"]

TRACKERS: Mapping[str, type[Tracker]] = {"wandb": WandbRun, "mlflow": MlflowRun}


def check_known(trackers: Iterable[str], whose: str) -> None:
    """Raise `BadInput` for a tracker that is not in `TRACKERS`; ``whose`` names what asks."""
    for tracker in trackers:
        if tracker not in TRACKERS:
            raise BadInput(
                f"{whose} asks for tracker '{tracker}', which is not known; use one of "
                f"{', '.join(TRACKERS)}, or write a callback"
            )


def check_installed(trackers: Iterable[str], whose: str) -> None:
    """Raise `BadInput` for a tracker whose package is not installed here."""
    for tracker in trackers:
        found = find_spec(tracker)
        # A folder of that name, such as W&B leaves where it was run, is no package.
        if found is None or found.origin is None:
            raise BadInput(
                f"{whose} asks for tracker '{tracker}', and the package {tracker} is not "
                f"installed; install it or leave the tracker out"
            )
