"""Trains a job on the ranks that torchrun or srun has started, on one host or several."""

import os
from dataclasses import replace

from penstock.errors import SaidByAnotherRank
from penstock.jobs.job import Job
from penstock.jobs.run_directory import RunDirectory
from penstock.jobs.started_ranks import joined_ranks
from penstock.jobs.train import TrainResult, job_as_asked, train_job
from penstock.jobs.train_request import Log, TrainRequest

__all__ = ["train_on_ranks"]

SIGNALLED = 128
"""Exit codes above this one say which signal has ended the run."""


def train_on_ranks(job: Job, request: TrainRequest, *, log: Log) -> TrainResult | None:
    """Train ``job``; every rank must call this. Only rank 0 logs, records and has a result.

    The number of ranks that were started takes the place of ``request.workers``. A start after a
    failure, or after hosts have come or gone, resumes the run that this launch has begun.

    Raises:
        PenstockError: as `train_job`; on the rank that has failed first.
        SaidByAnotherRank: on all other ranks.
    """
    ranks = joined_ranks(job_as_asked(job, request))
    with ranks.saying_once():
        if ranks.rank:
            ranks.give_facts()
            end_with(ranks.follow(job_as_asked(job, request)))
            return None
        asked = replace(request, workers=ranks.size, resume=request.resume or goes_on(request))
        with ranks.directed():
            ranks.check_facts()
            return train_job(job, asked, log=log, workers=ranks)


def end_with(code: int) -> None:
    """End this rank as rank 0 ends, which has said why."""
    if code > SIGNALLED:
        raise SystemExit(code)
    if code:
        raise SaidByAnotherRank(code)


def goes_on(request: TrainRequest) -> bool:
    """Whether torchrun has started the ranks again, after the run had been planned.

    Its count of restarts stays the same when hosts come and go; then the launch's name tells it.
    """
    if request.out is None:
        return False
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    directory = RunDirectory(request.out)
    return (again and (request.out / "plan.json").exists()) or directory.is_of_this_launch
