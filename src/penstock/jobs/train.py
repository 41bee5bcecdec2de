"""Trains a job on this machine: measure, plan, predict, run, report."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import BadInput
from penstock.jobs.device_check import check_device
from penstock.jobs.job import Job
from penstock.jobs.measured_lengths import MeasuredLength, mean_s
from penstock.jobs.plan_job import check_plan_fits
from penstock.jobs.replanning import LEAST_GAIN, replan
from penstock.jobs.run_directory import RunDirectory, latest_run, new_run
from penstock.jobs.run_workers import LocalWorkers, RunWorkers, check_loss_allowed
from penstock.jobs.train_part import RunPart
from penstock.jobs.train_request import Log, TrainRequest
from penstock.jobs.worker_changes import Course, train_through_changes
from penstock.measure.links import usable_cores
from penstock.measure.machine_load import busy_beside
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan
from penstock.report.page import write_report
from penstock.runtime.checkpoints.checkpoint import latest_checkpoint
from penstock.runtime.checkpoints.weight_saving import check_free
from penstock.runtime.trackers import check_trackers
from penstock.waiting import notice_if_long

__all__ = ["TrainRequest", "TrainResult", "job_as_asked", "train_job"]


@dataclass(frozen=True)
class TrainResult:
    """The result of a run; its fields are the keys of ``penstock train --json``.

    If batches have different lengths, ``predicted_s`` and ``measured_s`` are means over them. Both
    are those of the last part of the run, if its workers or its plan changed.
    """

    steps: int
    loss: float
    samples_per_s: float
    predicted_s: float
    measured_s: float
    verified: str
    plan: Path
    checkpoint: Path
    report: Path
    run_directory: Path
    weights: Path | None = None
    by_length: tuple[MeasuredLength, ...] = ()
    left_out_steps: tuple[int, ...] = ()
    drift: tuple[str, ...] = ()
    lost_workers: int = 0


def job_as_asked(job: Job, request: TrainRequest) -> Job:
    """The job with what the request changes in it."""
    job = replace(job, steps=request.steps) if request.steps else job
    job = replace(job, save_weights=request.save_weights or job.save_weights)
    return job if request.verify else replace(job, verify="off")


def train_job(
    job: Job,
    request: TrainRequest,
    *,
    log: Log | None = None,
    workers: RunWorkers | None = None,
) -> TrainResult:
    """Train ``job`` and write its run directory; see `TrainRequest`.

    Without ``workers`` this process starts them on its host.

    Raises:
        BadInput: the request or the job cannot be carried out.
        Infeasible: no plan fits in the memory of the workers.
        RunFailed: a worker failed, more than ``may_lose`` were killed, or the loss was not finite.
            The last checkpoint is complete, and ``resume`` continues from it.
        KeyboardInterrupt: Ctrl-C; the last checkpoint is complete as well.
    """
    say = log or (lambda text: print(text, file=sys.stderr, flush=True) if request.shown else None)
    if request.workers < 1:
        raise BadInput(f"--workers is {request.workers}; at least 1 is needed")
    check_device(request.device, request.workers)
    job, workers = job_as_asked(job, request), workers or LocalWorkers()
    if job.save_weights is not None:
        check_free(job.save_weights)
    given = read_plan(request.plan) if request.plan else None
    if given:
        check_plan_fits(given, job, request.workers, f"plan '{request.plan}'")
        if len(given.ranks) < request.workers:
            say(
                f"plan '{request.plan}' uses {len(given.ranks)} of {request.workers} workers, and "
                f"the others idle; start {len(given.ranks)} with --workers, or plan for "
                f"{request.workers}"
            )
        job = with_groups_of(given, job)
    check_group_sizes(job, request.workers)
    check_loss_allowed(request, workers)
    check_trackers(job.trackers, f"job '{job.name}'")
    find = latest_run if request.resume else new_run
    directory = find(job.name, request.out)
    with directory.held():
        part, course = train_through_changes(directory, job, request, given, workers, say)
        return finish(job, request, directory, part, course, say)


def with_groups_of(plan: Plan, job: Job) -> Job:
    """The job with the sizes of the tensor groups of ``plan``, so that their costs are measured."""
    sizes = tuple(sorted({len(group) for group in plan.tensor_groups} - {1}))
    return replace(job, tensor_parallel=replace(job.tensor_parallel, ranks=sizes, given=True))


def check_group_sizes(job: Job, workers: int) -> None:
    """Raise `BadInput` if no tensor group that the job asks for has enough workers."""
    sizes = job.tensor_parallel.ranks
    if sizes and min(sizes) > workers:
        raise BadInput(
            f"job '{job.name}': tensor_parallel has groups of {list(sizes)} ranks, but there are "
            f"{workers} workers; start at least {min(sizes)} with --workers"
        )


def finish(
    job: Job,
    request: TrainRequest,
    directory: RunDirectory,
    part: RunPart,
    course: Course,
    say: Log,
) -> TrainResult:
    """Write the measured timeline, the summary and the report."""
    first, plan = part.first, part.plan
    measured_s = mean_s(part.lengths) or first.measured_s
    samples_per_s = first.samples_per_s * first.measured_s / measured_s
    directory.write_measured(first.timeline)
    peaks = [part.reports[rank].peak_memory_bytes for rank in plan.ranks]
    summary: dict[str, Any] = {
        "name": directory.path.name,
        "job": job.name,
        "planner": plan.planner,
        "schedule": plan.schedule,
        "workers": len(part.reports),
        "predicted_s": part.prediction.iteration_s,
        "measured_s": measured_s,
        "predicted_peak_memory_bytes": list(part.prediction.peak_memory_bytes),
        "measured_peak_memory_bytes": peaks,
        "steps": first.steps,
        "loss": first.loss,
        "samples_per_s": samples_per_s,
    }
    if first.data_ended:
        summary["data_ended_after"] = first.steps
        say(
            f"the data of job '{job.name}' ended after {first.steps} of {job.steps} steps, and the "
            f"training with them; give data for all steps, or set steps = {first.steps}"
        )
    drift = course.drift
    if first.drifts:
        drift += tuple(map(str, first.drifts))
        with notice_if_long(say, "planning again, since ranks or links were slower than planned"):
            drift += (hint_of_new_plan(job, request, directory, part),)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", len(part.reports)))
    busy = busy_beside(here, usable_cores(), os.getloadavg()[0])
    if busy:
        say(busy)
        summary["busy"] = busy
    if drift:
        summary["drift"] = list(drift)
    for text in drift[len(course.drift) :]:
        say(text)
    left_out = tuple(sorted(course.left_out))
    if left_out:
        summary["left_out_steps"] = list(left_out)
    if part.lengths:
        summary["by_length"] = [found.to_json() for found in part.lengths]
    directory.write_summary(summary)
    return TrainResult(
        steps=first.steps,
        loss=first.loss,
        samples_per_s=samples_per_s,
        predicted_s=part.prediction.iteration_s,
        measured_s=measured_s,
        verified=course.verified,
        plan=directory.path / "plan.json",
        checkpoint=latest_checkpoint(directory.checkpoints),
        report=write_report(directory.path),
        run_directory=directory.path,
        weights=job.save_weights,
        by_length=part.lengths,
        left_out_steps=left_out,
        drift=drift,
        lost_workers=course.lost,
    )


def hint_of_new_plan(
    job: Job, request: TrainRequest, directory: RunDirectory, part: RunPart
) -> str:
    """What planning again would bring; a plan that gains enough is written beside the old one."""
    asked = replace(request, workers=len(part.reports))
    replanned, _ = replan(job, asked, part.plan, directory.read_costs(), part.first.drifts)
    if replanned.gain < LEAST_GAIN:
        return "planning again with these times would bring nothing"
    place = directory.path / "replanned.json"
    write_plan(replanned.plan, place)
    return f"{replanned}; to do so: --resume --out {directory.path} --plan {place}"
