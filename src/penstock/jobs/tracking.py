"""The trackers of a job's run."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from penstock.jobs.job import Job
from penstock.plan.plan import Plan
from penstock.runtime.tracking.track import TrackingCallback
from penstock.runtime.tracking.tracked_run import TrackedRun

__all__ = ["tracking"]

SHOWN = ("batch_size", "steps", "seed", "accumulate", "clip_norm", "autocast", "optimizer_sync")
"""The fields of a job that trackers show, besides the optimizer's."""


def tracking(
    directory: Path, job: Job, plan: Plan, say: Callable[[str], None]
) -> list[TrackingCallback]:
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
    run = TrackedRun(job.name, directory.name, str(directory / "trackers"), config)
    return [TrackingCallback(tracker, run, say) for tracker in job.trackers]
