"""Trains a job on this machine: measure, plan, predict, run, report.

A run whose workers change: they are lost and come back, or turn out slower than planned.

Between two changes the same workers follow the same plan, which is a part of the run. Each part
starts at the newest checkpoint, and takes the steps after it with the same samples.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.cluster.cluster import Cluster, Link
from penstock.errors import BadInput, Infeasible, RunFailed
from penstock.jobs.data_lengths import MeasuredLength, mean_s
from penstock.jobs.device_check import check_device
from penstock.jobs.job import Job
from penstock.jobs.plan_job import check_plan_fits, new_plan, predict
from penstock.jobs.run_directory import RunDirectory, latest_run, new_run
from penstock.jobs.run_workers import LocalWorkers, RunWorkers, check_loss_allowed
from penstock.jobs.train_part import LOST, RunPart, train_part
from penstock.jobs.train_request import Log, TrainRequest
from penstock.jobs.worker import Pauses
from penstock.measure.links import usable_cores
from penstock.measure.machine_load import busy_beside
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan
from penstock.planning.answers import TimeLimit
from penstock.profile.model_profile import LayerCost, ModelProfile
from penstock.report.page import write_report
from penstock.runtime.checkpoints.checkpoint import latest_checkpoint
from penstock.runtime.checkpoints.weight_saving import check_free
from penstock.runtime.trackers import check_trackers
from penstock.timeline.drift import Drift
from penstock.waiting import notice_if_long
from penstock.words import percent_text, seconds_text

__all__ = ["TrainRequest", "TrainResult", "as_found", "job_as_asked", "train_job"]


@dataclass
class Course:
    """What has happened to a run so far.

    ``plans`` are those in use, by the number of workers. ``lost`` counts workers. ``patience`` is
    the number of checkpoints after which the place of a lost worker is taken again. It last was
    ``back_with`` this one.
    """

    plans: dict[int, Plan]
    lost: int = 0
    patience: int = 1
    back_with: Path | None = None
    drift: tuple[str, ...] = ()
    verified: str = ""
    left_out: set[int] = field(default_factory=set[int])


def train_through_changes(
    directory: RunDirectory,
    job: Job,
    request: TrainRequest,
    given: Plan | None,
    crew: RunWorkers,
    say: Log,
) -> tuple[RunPart, Course]:
    """Train to the end, with another plan after each change; returns the last part too.

    Raises:
        RunFailed: a worker raised an error; or more are missing than the request allows, or those
            that are left cannot go on.
    """
    workers = request.workers
    course = Course({} if given is None else {workers: given})
    part = request
    while True:
        missing = workers - part.workers
        pauses = Pauses(checkpoints=course.patience if missing else 0, drift=request.replan)
        try:
            done = train_part(directory, job, part, course.plans, pauses, crew, say)
        except LOST as cause:
            if not part.may_lose:
                raise
            part = without_one(directory, part, course)
            say(f"{cause}; the run goes on with {part.workers} worker(s)")
            continue
        except Infeasible as none:
            if not missing:
                raise
            raise RunFailed(f"{part.workers} worker(s) cannot go on alone: {none}") from none
        course.verified = course.verified or done.first.verified
        course.left_out.update(done.first.left_out)
        if not done.first.paused:
            return done, course
        if missing:
            course.back_with = latest_checkpoint(directory.checkpoints)
            say(f"step {done.first.steps}: the places of {missing} lost worker(s) are taken again")
        if done.first.drifts:
            follow_drift(directory, job, part, done, course, say)
        part = replace(part, workers=workers, may_lose=request.may_lose, resume=True)


def without_one(directory: RunDirectory, part: TrainRequest, course: Course) -> TrainRequest:
    """The request for the workers that are left.

    One that is lost again before the next checkpoint takes its place later: it may break down each
    time.
    """
    back_with = course.back_with
    lost_at_once = back_with is not None and back_with == latest_checkpoint(directory.checkpoints)
    course.patience = 2 * course.patience if lost_at_once else 1
    course.lost += 1
    known = (directory.path / "plan.json").exists()
    return replace(
        part, workers=part.workers - 1, may_lose=part.may_lose - 1, plan=None, resume=known
    )


def follow_drift(
    directory: RunDirectory,
    job: Job,
    part: TrainRequest,
    done: RunPart,
    course: Course,
    say: Log,
) -> None:
    """Plan again with the times found, and follow the new plan if it gains enough.

    In both cases the rest of the run is compared with the times found.
    """
    costs = directory.read_costs()
    with notice_if_long(say, "planning again, since ranks or links were slower than planned"):
        replanned, found = replan(job, part, done.plan, costs, done.first.drifts)
    directory.write_costs(*found)
    # Plans for other numbers of workers were made with the old times.
    course.plans.clear()
    course.plans[part.workers] = replanned.plan if replanned.gain >= LEAST_GAIN else done.plan
    text = f"step {done.first.steps}: {replanned}; the run follows the new plan"
    if replanned.gain < LEAST_GAIN:
        text = f"step {done.first.steps}: planning again would bring nothing; the plan stays"
    course.drift += (*map(str, done.first.drifts), text)
    say(text)


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


LIMIT = TimeLimit(10.0, time.perf_counter)
"""For a plan that nobody has asked for, or that the workers wait for."""

LEAST_GAIN = 0.05
"""Share of a step's time that a new plan must save to be worth a change."""

Costs = tuple[ModelProfile, Cluster]


@dataclass(frozen=True, slots=True)
class Replanned:
    """A plan made with the times of a run, and seconds of a step under the old plan and under it.

    Both are predicted, from the same times.
    """

    plan: Plan
    now_s: float
    then_s: float

    @property
    def gain(self) -> float:
        """The share of the step's time that would be saved."""
        return 1 - self.then_s / self.now_s

    def __str__(self) -> str:
        return (
            f"planning again with these times would take a step from {seconds_text(self.now_s)} to "
            f"{seconds_text(self.then_s)} (by prediction, {percent_text(self.gain)} less)"
        )


def replan(
    job: Job, request: TrainRequest, plan: Plan, costs: Costs, drifts: Sequence[Drift]
) -> tuple[Replanned, Costs]:
    """What planning again would bring, and profile and cluster with the times found."""
    profile, cluster = as_found(plan, *costs, drifts)
    found = new_plan(job, request, profile, cluster, LIMIT)
    now_s, then_s = (predict(job, each, profile, cluster).iteration_s for each in (plan, found))
    return Replanned(found, now_s, then_s), (profile, cluster)


def as_found(plan: Plan, profile: ModelProfile, cluster: Cluster, drifts: Sequence[Drift]) -> Costs:
    """Profile and cluster with the times of a run that drifted.

    All layers take longer by the common factor. What all replicas of a stage have in common beyond
    that is the cost of its layers. The rest is the speed of a device.
    """
    stages = {drift.part[1:]: drift.factor for drift in drifts if drift.part.kind == "stage"}
    layers = [slower(layer, drifts[0].common if drifts else 1.0) for layer in profile.layers]
    speeds = [device.speed for device in cluster.devices]
    for number, stage in enumerate(plan.stages):
        ranks = [rank for device in plan.devices_of(number) for rank in plan.ranks_of(device)]
        factors = {rank: stages.get((number, rank), 1.0) for rank in ranks}
        common = min(factors.values())
        for layer in stage.layers:
            layers[layer] = slower(layers[layer], common)
        for rank, factor in factors.items():
            speeds[rank] = min(speeds[rank], cluster.devices[rank].speed * common / factor)
    links = dict(cluster.special_links)
    for drift in drifts:
        kind, source, target = drift.part
        if kind == "link":
            rate = cluster.bandwidth(source, target) / drift.factor
            links[source, target] = Link(source, target, rate, cluster.latency(source, target))
    own = iter(speeds)
    hosts = tuple(
        replace(host, devices=tuple(replace(d, speed=next(own)) for d in host.devices))
        for host in cluster.hosts
    )
    found = replace(profile, layers=tuple(layers))
    return found, replace(cluster, hosts=hosts, links=tuple(links.values()))


def slower(layer: LayerCost, factor: float) -> LayerCost:
    """A layer whose times are ``factor`` times as long."""
    return replace(
        layer,
        forward_s=layer.forward_s.scaled(factor),
        backward_input_s=layer.backward_input_s.scaled(factor),
        backward_weight_s=layer.backward_weight_s.scaled(factor),
    )
