"""What a tracker is told about a run, and what it must be able to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

__all__ = ["Config", "TrackedRun", "Tracker"]

Config: TypeAlias = Mapping[str, str | int | float | bool]
"""The settings of a run by name."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker shows of a run before the first step.

    ``project`` is W&B's project or MLflow's experiment. ``name`` is that of the run there.
    ``directory`` is for the tracker's own files.
    """

    project: str
    name: str
    directory: str
    config: Config


class Tracker(Protocol):
    """A run that a tracker shows; ``run_id`` names it there, and goes on with it later."""

    run_id: str

    def __init__(self, run: TrackedRun, run_id: str) -> None:
        """Start a new run (``run_id`` is empty), or go on with that one."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show values after ``step`` steps."""
        ...

    def finish(self) -> None:
        """Send what is left and mark the run as finished."""
        ...
