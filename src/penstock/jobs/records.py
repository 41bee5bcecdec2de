"""What a run records while it runs: metrics.jsonl, TensorBoard's event files, and trackers."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.jobs.job import Job
from penstock.jobs.run_directory import RunDirectory, drop_rows_after
from penstock.plan.plan import Plan
from penstock.runtime.metrics import StepMetrics, evaluation_row, numbers_in, step_row
from penstock.runtime.trackers import Tracker
from penstock.runtime.user_metrics import Evaluation

__all__ = ["Records", "trackers_of"]

SHOWN = ("batch_size", "steps", "seed", "accumulate", "clip_norm", "autocast", "optimizer_sync")
"""The fields of a job that trackers show, besides the optimizer's."""


def trackers_of(
    directory: Path, job: Job, plan: Plan, say: Callable[[str], None]
) -> tuple[Tracker, ...]:
    """A callback for each tracker of the job; their files are in ``directory/trackers``.

    The job's name is that of the project, and the run directory's that of the run.
    """
    config = {
        **{name: getattr(job, name) for name in SHOWN},
        **{f"optimizer.{name}": str(value) for name, value in asdict(job.optimizer).items()},
        "planner": plan.planner,
        "schedule": plan.schedule,
        "stages": len(plan.stages),
        "micro_batches": plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
    }
    files = directory / "trackers"
    return tuple(
        Tracker(tracker, files, job.name, directory.name, config, say) for tracker in job.trackers
    )


class Records:
    """The records of rank 0; other ranks write nothing.

    A resumed run first drops what was recorded after the checkpoint that it starts from.
    """

    def __init__(self, directory: RunDirectory, start: int, *, writes: bool) -> None:
        self._directory, self._writes = directory, writes
        self._quiet = ExitStack()
        self._open(start)

    def _open(self, start: int) -> None:
        if not self._writes:
            return
        directory = self._directory
        drop_rows_after(directory.metrics, start)
        # Importing TensorBoard takes a second, and only rank 0 needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._quiet.enter_context(quiet_writers())
        self._file = directory.metrics.open("a", buffering=1)
        self._board = SummaryWriter(str(directory.tensorboard), purge_step=start + 1)

    def go_back(self, step: int) -> None:
        """Drop what was recorded after ``step``; these steps will be taken again."""
        self.close()
        self._open(step)

    def step(
        self, metrics: StepMetrics, verified: str = "", lengths: Mapping[str, int] | None = None
    ) -> None:
        """Record a step, with the result of verification, if any, and the batch's lengths."""
        row = step_row(metrics)
        if verified:
            row["verified"] = verified
        if lengths:
            row["lengths"] = dict(lengths)
        self._write(metrics.step, row)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Record loss and metrics on held-out data."""
        self._write(step, evaluation_row(step, evaluation))

    def drift(self, step: int, factors: Mapping[str, float]) -> None:
        """Show on TensorBoard how many times as long as planned each stage and link took."""
        if self._writes:
            with named(self._directory.tensorboard):
                for name, factor in factors.items():
                    self._board.add_scalar(f"drift/{name}", factor, step)

    def close(self) -> None:
        """Flush everything to disk."""
        if self._writes:
            self._quiet.close()
            with named(self._directory.metrics):
                self._file.close()
            with named(self._directory.tensorboard):
                self._board.close()

    def _write(self, step: int, row: dict[str, Any]) -> None:
        if not self._writes:
            return
        with named(self._directory.metrics):
            self._file.write(f"{json.dumps(row)}\n")
        with named(self._directory.tensorboard):
            for name, value in numbers_in(row).items():
                self._board.add_scalar(name, value, step)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Within, an error of the disk names ``path``; Python's own does not say what was written."""
    try:
        yield
    except OSError as cause:
        if cause.filename is not None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from cause


@contextmanager
def quiet_writers() -> Iterator[None]:
    """Within, no traceback is printed when TensorBoard's thread fails to write to the disk.

    The next record raises the same error in this thread, which ends the run with a message.
    """
    before = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        of_tensorboard = type(failure.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and isinstance(failure.exc_value, OSError)):
            before(failure)

    threading.excepthook = hook
    try:
        yield
    finally:
        # Somebody else's hook may have come since, and call this one.
        if threading.excepthook is hook:
            threading.excepthook = before
