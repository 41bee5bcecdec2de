"""A part of a run: the same workers follow the same plan, from a checkpoint to a later one."""

import signal
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput, Stalled, WorkerLost
from penstock.jobs.data_lengths import MeasuredLength, measured_lengths
from penstock.jobs.job import Job
from penstock.jobs.plan_job import (
    check_layers,
    check_plan_fits,
    new_plan,
    predict_step,
    without_pipeline_words,
)
from penstock.jobs.profile_job import CostedJob, has_tensor_costs
from penstock.jobs.progress import show_cursor
from penstock.jobs.run_directory import RunDirectory, read_rows
from penstock.jobs.run_workers import RunWorkers
from penstock.jobs.train_request import Log, TrainRequest
from penstock.jobs.worker import WARM_UP_STEPS, Pauses, WorkerReport, WorkerTask
from penstock.plan.in_words import plan_words
from penstock.plan.plan import Plan
from penstock.planning.answers import TimeLimit
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.checkpoints.checkpoint import complete_in, damage_of, latest_checkpoint
from penstock.simulate.simulation import Prediction
from penstock.waiting import notice_if_long
from penstock.words import counted, seconds_text

__all__ = ["LOST", "RunPart", "checkpoint_to_resume", "train_part"]

LOST = WorkerLost, Stalled
"""After these errors the other workers can go on."""

AFTER_A_LOSS = TimeLimit(2.0, time.perf_counter)
"""For the plan of the workers that are left, while they stand still."""

WAIT_LIMIT_STEPS, LEAST_WAIT_LIMIT_S = 20, 60.0
"""A rank waits for another at most as long as so many predicted steps, and as so many seconds."""


@dataclass(frozen=True)
class RunPart:
    """A part of a run that has ended: its plan, what was predicted, and the reports by rank.

    ``lengths`` are the measured lengths of its batches, where these differ.
    """

    plan: Plan
    prediction: Prediction
    reports: tuple[WorkerReport, ...]
    lengths: tuple[MeasuredLength, ...]

    @property
    def first(self) -> WorkerReport:
        """The report of rank 0."""
        return self.reports[0]


def train_part(
    directory: RunDirectory,
    job: Job,
    request: TrainRequest,
    plans: dict[int, Plan],
    pauses: Pauses,
    crew: RunWorkers,
    say: Log,
) -> RunPart:
    """Measure and plan where that is not done yet, predict, and train.

    ``plans`` are known plans by the number of workers. The plan of this part is added.
    """
    resume_from = checkpoint_to_resume(directory, say) if request.resume else None
    if resume_from and job.weights is not None and not Path(job.weights.directory).exists():
        # The checkpoint contains all weights.
        job = replace(job, weights=None)
    before = directory.hosts()
    profile, cluster = costs_of(job, request, directory, crew, say)
    stays = request.resume and still_there(before, directory.hosts())
    with notice_if_long(say, "planning"):
        plan = plan_for(job, request, directory, (profile, cluster), plans, stays, say)
    check_plan_fits(plan, job, request.workers, f"the plan of '{directory.path}'")
    check_layers(plan, profile)
    plans[request.workers] = plan
    directory.write_plan(plan)
    with notice_if_long(say, "simulating a step of the plan"):
        prediction, by_length = predict_step(job, plan, profile, cluster)
        other = without_pipeline_words(job, plan, profile, cluster)
    directory.write_predicted(prediction.timeline)
    step = f"predicted {seconds_text(prediction.iteration_s)} a step"
    say("; ".join(filter(None, (f"plan: {plan_words(plan, 'worker')}", step, other))))
    say(f"starting {request.workers} workers")
    task = WorkerTask(
        job,
        plan,
        directory.path,
        resume_from,
        request.device,
        request.shown,
        timeout_s=max(LEAST_WAIT_LIMIT_S, WAIT_LIMIT_STEPS * prediction.iteration_s),
        pauses=pauses,
    )
    with last_checkpoint_said(directory, say, goes_on=request.may_lose > 0):
        reports = crew.train(task, request.workers, directory.logs)
        if any(report.terminated for report in reports) and reports[0].steps < job.steps:
            say(f"stopped by SIGTERM after step {reports[0].steps}")
            raise SystemExit(128 + signal.SIGTERM)
    start = reports[0].start
    lengths = measured_lengths(by_length, read_rows(directory.metrics), start + WARM_UP_STEPS)
    return RunPart(plan, prediction, reports, lengths)


def checkpoint_to_resume(directory: RunDirectory, say: Log) -> Path | None:
    """The newest undamaged checkpoint; None if the run ended before its first one.

    Raises:
        BadInput: all checkpoints are damaged.
    """
    found = complete_in(directory.checkpoints)
    for path in reversed(found):
        damage = damage_of(path)
        if not damage:
            return path
        say(f"checkpoint '{path}' is left out: {damage}")
    if found:
        raise BadInput(
            f"all {len(found)} checkpoints of '{directory.path}' are damaged; restore one from a "
            f"copy, or start a new run with another --out"
        )
    say(f"'{directory.path}' has no checkpoint yet; training starts at the first step")
    return None


def costs_of(
    job: Job, request: TrainRequest, directory: RunDirectory, crew: RunWorkers, say: Log
) -> tuple[ModelProfile, Cluster]:
    """Profile and cluster, measured now or by the run that is resumed."""
    if directory.is_costed:
        before = CostedJob(*directory.read_costs())
        known = crew.known(before, request)
        if known and has_tensor_costs(known.profile, job):
            if known != before:
                directory.write_costs(known.profile, known.cluster)
            return known.profile, known.cluster
    say(f"measuring the layers of '{job.name}' and the links between workers")
    start_s = time.perf_counter()
    costed = crew.measured(job, request, directory.logs)
    directory.write_costs(costed.profile, costed.cluster)
    seconds = time.perf_counter() - start_s
    say(f"measured {counted(len(costed.profile.layers), 'layer')} in {seconds:.1f} s")
    for text in costed.profile.notes:
        say(text)
    return costed.profile, costed.cluster


def plan_for(
    job: Job,
    request: TrainRequest,
    directory: RunDirectory,
    costs: tuple[ModelProfile, Cluster],
    plans: Mapping[int, Plan],
    stays: bool,
    say: Log,
) -> Plan:
    """The known plan for so many workers, or a resumed run's own if that suits, or a new one.

    A run's own plan suits if the run ``stays`` on as many workers of as many hosts. It does not
    where workers have come back, since it does not use them.
    """
    if request.workers in plans:
        return plans[request.workers]
    if request.resume and request.workers < max(plans, default=request.workers + 1):
        before = directory.read_plan()
        if stays and max(before.ranks) < request.workers and before.global_batch == job.batch_size:
            return before
        say("the run gets a new plan, because its hosts, its workers or the batch size changed")
    return new_plan(job, request, *costs, AFTER_A_LOSS if plans else None)


def still_there(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether the workers of each host are those of before, or the only host has fewer of them."""
    return now == before or (len(now) == len(before) == 1 and now <= before)


@contextmanager
def last_checkpoint_said(directory: RunDirectory, say: Log, *, goes_on: bool) -> Generator[None]:
    """Within, a failure prints how to resume the run, unless the run ``goes_on`` by itself."""
    try:
        yield
    except BaseException as failure:
        show_cursor()
        if not (goes_on and isinstance(failure, LOST)):
            remedy = f"--resume --out {directory.path}"
            try:
                checkpoint = latest_checkpoint(directory.checkpoints)
                say(f"the last checkpoint is {checkpoint}; {remedy} continues")
            except BadInput:
                # An error of the user's would come again.
                if isinstance(failure, (KeyboardInterrupt, SystemExit, *LOST)):
                    say(f"there is no checkpoint yet; {remedy} starts at the first step again")
        raise
