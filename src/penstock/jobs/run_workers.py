"""Who carries out a run: workers that this process starts, or ranks that are there already."""

from pathlib import Path
from typing import Protocol

from penstock.errors import BadInput
from penstock.jobs.job import Job
from penstock.jobs.profile_job import CostedJob, cluster_for, cost_job
from penstock.jobs.train_request import TrainRequest
from penstock.jobs.worker import WorkerReport, WorkerTask, train_worker
from penstock.runtime.processes.launch import launch_workers

__all__ = ["LocalWorkers", "RunWorkers", "check_loss_allowed"]


class RunWorkers(Protocol):
    """The workers of a run, as the process that directs it sees them."""

    def measured(self, job: Job, request: TrainRequest, logs: Path) -> CostedJob:
        """Profile and cluster of all workers, which measure at the same time."""
        ...

    def known(self, costs: CostedJob, request: TrainRequest) -> CostedJob | None:
        """Costs that were measured before, as they are for these workers; None: measure again."""
        ...

    def train(self, task: WorkerTask, count: int, logs: Path) -> tuple[WorkerReport, ...]:
        """Let ``count`` workers carry out a task; returns their reports by rank."""
        ...


class LocalWorkers:
    """Processes of this host, started for each task."""

    def measured(self, job: Job, request: TrainRequest, logs: Path) -> CostedJob:
        """See `RunWorkers`."""
        count, device = request.workers, request.device
        return cost_job(job, workers=count, device=device, log_directory=logs)

    def known(self, costs: CostedJob, request: TrainRequest) -> CostedJob | None:
        """See `RunWorkers`; layers and links of CPU workers stay, whatever their number."""
        cluster = costs.cluster
        host, *others = cluster.hosts
        if others:
            return None
        if len(cluster.devices) == request.workers:
            return costs
        if request.device == "cpu" and len(cluster.devices) > 1:
            return CostedJob(costs.profile, cluster_for(request.workers, host))
        return None

    def train(self, task: WorkerTask, count: int, logs: Path) -> tuple[WorkerReport, ...]:
        """See `RunWorkers`."""
        arguments = (task,)
        return launch_workers(
            train_worker, arguments, workers=count, log_directory=logs, drains=True
        )


def check_loss_allowed(request: TrainRequest, workers: RunWorkers) -> None:
    """Raise `BadInput` if more workers may be lost than there are, or if they are not ours."""
    if not 0 <= request.may_lose < request.workers:
        raise BadInput(
            f"--may-lose is {request.may_lose}, but of {request.workers} workers at most "
            f"{request.workers - 1} can be lost"
        )
    if request.may_lose and not isinstance(workers, LocalWorkers):
        raise BadInput(
            f"--may-lose is {request.may_lose}, but torchrun or srun has started the ranks and "
            f"starts them again; leave --may-lose out and give torchrun --max-restarts"
        )
