"""Trains a job on this machine: measure, plan, predict, run, report."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput, Infeasible, RunFailed, Stalled, WorkerLost
from penstock.jobs.compile_ahead import planners_compiled_beside
from penstock.jobs.job import Job
from penstock.jobs.measured_lengths import MeasuredLength, mean_s, measured_lengths
from penstock.jobs.profile_job import cluster_for, cost_job
from penstock.jobs.progress import show_cursor
from penstock.jobs.replanning import Replanned, as_found
from penstock.jobs.run_directory import RunDirectory, latest_run, new_run, read_rows
from penstock.jobs.worker import WARM_UP_STEPS, WorkerReport, WorkerTask, train_worker
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan
from penstock.plan.problem import AS_FAST, MEMORY_RESERVE, PlanningProblem
from penstock.plan.undoable_step import with_undoable_step
from penstock.planning.answers import TimeLimit
from penstock.planning.planning_problem import schedules_named
from penstock.planning.time_limit import plan_within
from penstock.profile.model_profile import ModelProfile
from penstock.report.page import write_report
from penstock.runtime.checkpoints.checkpoint import complete_in, damage_of, latest_checkpoint
from penstock.runtime.checkpoints.weight_saving import check_free
from penstock.runtime.micro_batches import check_runnable
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.without_flush.order import updates_per_batch
from penstock.search.registry import PLANNERS
from penstock.simulate.by_length import expected_s, predict_lengths
from penstock.simulate.score import make_score
from penstock.simulate.simulation import Prediction, simulate_plan
from penstock.timeline.drift import Drift
from penstock.waiting import notice_if_long

__all__ = ["TrainRequest", "TrainResult", "check_plan_fits", "problem_of", "train_job"]

LOST = WorkerLost, Stalled
"""After these errors the other workers can go on."""

AFTER_A_LOSS = TimeLimit(2.0, time.perf_counter)
"""For the plan of the workers that are left, while they stand still."""

REPLANNING_LIMIT = TimeLimit(10.0, time.perf_counter)
"""At the end of a run, a plan with the times found is a hint, which nobody wants to wait for."""

STEADY_ITERATIONS = 6
"""Iterations to simulate for the steady-state step time."""

LEAST_GAIN = 0.05
"""Share of a step's time that a new plan must save to be worth a word."""

WAIT_LIMIT_STEPS, LEAST_WAIT_LIMIT_S = 20, 60.0
"""A rank waits for another at most as long as so many predicted steps, and as so many seconds."""

Log = Callable[[str], None]
"""Prints one line about what happens."""


@dataclass(frozen=True)
class TrainRequest:
    """The options of ``penstock train``.

    ``plan`` is a plan file (None: make a plan with ``planner`` and ``schedule`` that leaves the
    fraction ``memory_reserve`` of the memory free). ``out`` is the run directory (None: a new one
    under ``runs`` or, with ``resume``, the newest there). ``shown`` false: display nothing.
    ``verify`` false: do not compare the first step with the whole model, whatever the job says.
    ``save_weights`` is a directory for the final weights (None: the job's). ``allow_pickle`` allows
    to read checkpoints of format 1, which can run code. The run goes on after the loss of up to
    ``may_lose`` workers that were killed or stopped answering.
    """

    workers: int = 4
    steps: int = 0
    plan: Path | None = None
    planner: str = "search"
    schedule: str = "auto"
    memory_reserve: float = MEMORY_RESERVE
    resume: bool = False
    out: Path | None = None
    device: str = "cpu"
    shown: bool = True
    save_weights: Path | None = None
    verify: bool = True
    allow_pickle: bool = False
    may_lose: int = 0


@dataclass(frozen=True)
class TrainResult:
    """The result of a run; its fields are the keys of ``penstock train --json``.

    If batches have different lengths, ``predicted_s`` and ``measured_s`` are means over them. If
    workers were lost, both are those of the workers that were left.
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


def train_job(job: Job, request: TrainRequest, *, log: Log | None = None) -> TrainResult:
    """Train ``job`` and write its run directory; see `TrainRequest`.

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
    job = replace(job, steps=request.steps) if request.steps else job
    job = replace(job, save_weights=request.save_weights or job.save_weights)
    if job.save_weights is not None:
        check_free(job.save_weights)
    job = job if request.verify else replace(job, verify="off")
    given = read_plan(request.plan) if request.plan else None
    if given:
        check_plan_fits(given, job, request.workers, f"plan '{request.plan}'")
    if not 0 <= request.may_lose < request.workers:
        raise BadInput(
            f"--may-lose is {request.may_lose}, but of {request.workers} workers at most "
            f"{request.workers - 1} can be lost"
        )
    find = latest_run if request.resume else new_run
    directory = find(job.name, request.out)
    with directory.held():
        return train_with_losses(directory, job, request, given, say)


def train_with_losses(
    directory: RunDirectory, job: Job, request: TrainRequest, given: Plan | None, say: Log
) -> TrainResult:
    """Train; after the loss of a worker go on with the others, as often as the request allows.

    They get a plan for their number, from what was measured before. They start at the last
    checkpoint, and take the steps after it again, with the same samples.
    """
    lost = 0
    while True:
        limit = AFTER_A_LOSS if lost else None
        try:
            return replace(train_in(directory, job, request, given, say, limit), lost_workers=lost)
        except LOST as cause:
            if not request.may_lose:
                raise
            left, given, lost = request.workers - 1, None, lost + 1
            say(f"{cause}; the run goes on with {left} worker(s)")
            known = (directory.path / "plan.json").exists()
            request = replace(request, workers=left, may_lose=request.may_lose - 1, resume=known)
        except Infeasible as none:
            if not lost:
                raise
            raise RunFailed(f"{request.workers} worker(s) cannot go on alone: {none}") from none


def train_in(
    directory: RunDirectory,
    job: Job,
    request: TrainRequest,
    given: Plan | None,
    say: Log,
    limit: TimeLimit | None,
) -> TrainResult:
    """Measure, plan, predict, train and report in a directory that is locked for this run."""
    resume_from = checkpoint_to_resume(directory, say) if request.resume else None
    if resume_from and job.weights is not None and not Path(job.weights.directory).exists():
        # The checkpoint contains all weights.
        job = replace(job, weights=None)
    profile, cluster = costs_of(job, request, directory, say)
    with notice_if_long(say, "planning"):
        plan = given or plan_for(job, request, directory, (profile, cluster), say, limit)
    check_plan_fits(plan, job, request.workers, f"the plan of '{directory.path}'")
    check_layers(plan, profile)
    directory.write_plan(plan)
    with notice_if_long(say, "simulating a step of the plan"):
        prediction = predict(job, plan, profile, cluster)
    by_length = predict_lengths(profile, lambda at: predict(job, plan, at, cluster).iteration_s)
    if by_length:
        prediction = replace(prediction, iteration_s=expected_s(by_length))
    directory.write_predicted(prediction.timeline)
    say(f"plan: {in_words(plan)}; predicted {1000 * prediction.iteration_s:.0f} ms a step")
    say(f"starting {request.workers} workers")
    task = WorkerTask(
        job,
        plan,
        directory.path,
        resume_from,
        request.device,
        request.shown,
        request.allow_pickle,
        timeout_s=max(LEAST_WAIT_LIMIT_S, WAIT_LIMIT_STEPS * prediction.iteration_s),
    )
    with last_checkpoint_said(directory, say, goes_on=request.may_lose > 0):
        reports = launch_workers(
            train_worker,
            (task,),
            workers=request.workers,
            log_directory=directory.logs,
            drains=True,
        )
        if any(report.terminated for report in reports) and reports[0].steps < job.steps:
            say(f"stopped by SIGTERM after step {reports[0].steps}")
            raise SystemExit(128 + signal.SIGTERM)
    start = reports[0].start
    lengths = measured_lengths(by_length, read_rows(directory.metrics), start + WARM_UP_STEPS)
    return finish(job, request, directory, plan, prediction, reports, lengths, say)


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
    job: Job, request: TrainRequest, directory: RunDirectory, say: Log
) -> tuple[ModelProfile, Cluster]:
    """Profile and cluster, measured now or by the run that is resumed."""
    if directory.is_costed:
        profile, cluster = directory.read_costs()
        if len(cluster.devices) == request.workers:
            return profile, cluster
        if request.device == "cpu" and len(cluster.devices) > 1:
            cluster = cluster_for(request.workers, cluster.hosts[0])
            directory.write_costs(profile, cluster)
            return profile, cluster
    say(f"measuring the layers of '{job.name}' and the links between workers")
    start_s = time.perf_counter()
    costed = cost_job(
        job, workers=request.workers, device=request.device, log_directory=directory.logs
    )
    directory.write_costs(costed.profile, costed.cluster)
    seconds = time.perf_counter() - start_s
    say(f"measured {len(costed.profile.layers)} layers in {seconds:.1f} s")
    return costed.profile, costed.cluster


def problem_of(job: Job, profile: ModelProfile, cluster: Cluster) -> PlanningProblem:
    """The planning problem of a job."""
    state = job.optimizer.state_bytes_per_parameter_byte
    if job.optimizer_sync == "after":
        _, state = with_undoable_step(profile, state)
    return PlanningProblem(
        profile=profile,
        cluster=cluster,
        global_batch=job.batch_size,
        micro_batch_sizes=job.micro_batch_choices(),
        optimizer_bytes_per_parameter_byte=state,
    )


def plan_for(
    job: Job,
    request: TrainRequest,
    directory: RunDirectory,
    costs: tuple[ModelProfile, Cluster],
    say: Log,
    limit: TimeLimit | None,
) -> Plan:
    """A resumed run's own plan if it suits the workers and the batch, otherwise a new plan."""
    if request.resume:
        before = directory.read_plan()
        if max(before.devices) < request.workers and before.global_batch == job.batch_size:
            return before
        say("the run gets a new plan, because the workers or the batch size changed")
    return new_plan(job, request, *costs, limit)


def new_plan(
    job: Job,
    request: TrainRequest,
    profile: ModelProfile,
    cluster: Cluster,
    limit: TimeLimit | None = None,
) -> Plan:
    """A plan of the requested planner, the best one that it finds until the limit."""
    if request.planner not in PLANNERS:
        raise BadInput(f"planner '{request.planner}' is not one of {', '.join(PLANNERS)}; use one")
    problem = replace(
        problem_of(job, profile, cluster),
        schedules=schedules_named(request.schedule, request.planner),
        memory_reserve=request.memory_reserve,
        as_fast=AS_FAST,
    )
    with planners_compiled_beside():
        return plan_within(problem, request.planner, make_score(problem), limit=limit)


def check_plan_fits(plan: Plan, job: Job, workers: int, name: str) -> None:
    """Raise `BadInput` for a plan that these workers cannot run with this job."""
    check_runnable(plan)
    if job.accumulate > 1 and updates_per_batch(plan):
        raise BadInput(
            f"job '{job.name}' accumulates over {job.accumulate} batches, but schedule "
            f"'{plan.schedule}' of {name} updates weights without a flush; set accumulate = 1 in "
            f"the job, or use another schedule"
        )
    if max(plan.devices) >= workers:
        raise BadInput(
            f"{name} uses device {max(plan.devices)}, but there are {workers} workers (devices 0 "
            f"to {workers - 1}); start {max(plan.devices) + 1} with --workers, or plan for "
            f"{workers}"
        )
    if plan.global_batch != job.batch_size:
        raise BadInput(
            f"{name} is for batches of {plan.global_batch} samples ({plan.micro_batches} "
            f"micro-batches of {plan.micro_batch_size}), but job '{job.name}' has batches of "
            f"{job.batch_size}; plan for those or set batch_size = {plan.global_batch} in the job"
        )


def check_layers(plan: Plan, profile: ModelProfile) -> None:
    """Raise `BadInput` for a plan of another model."""
    layers = plan.stages[-1].layers.stop
    if layers != len(profile.layers):
        raise BadInput(
            f"the plan has {layers} layers, but '{profile.name}' has {len(profile.layers)}; plan "
            f"this model again"
        )


def predict(job: Job, plan: Plan, profile: ModelProfile, cluster: Cluster) -> Prediction:
    """Simulate an iteration of ``plan``; its time is that of a whole step with all its batches.

    Without a flush, or with ``optimizer_sync="after"``, it is the time in the steady state. With
    ``accumulate``, replicas are summed only after the last batch; here that is counted for each.
    """
    ask = partial(
        simulate_plan,
        plan,
        profile,
        cluster,
        optimizer_bytes_per_parameter_byte=job.optimizer.state_bytes_per_parameter_byte,
        shard_optimizer=job.shard_optimizer,
        optimizer_sync=job.optimizer_sync,
    )
    prediction = ask()
    if not updates_per_batch(plan) and job.optimizer_sync == "before":
        return replace(prediction, iteration_s=job.accumulate * prediction.iteration_s)
    several = ask(iterations=STEADY_ITERATIONS)
    peaks = several.peak_memory_bytes
    return replace(prediction, iteration_s=several.steady_s, peak_memory_bytes=peaks)


@contextmanager
def last_checkpoint_said(directory: RunDirectory, say: Log, *, goes_on: bool) -> Iterator[None]:
    """Within, a failure prints how to resume the run, unless the run ``goes_on`` by itself."""
    try:
        yield
    except BaseException as failure:
        show_cursor()
        if not (goes_on and isinstance(failure, LOST)):
            with suppress(BadInput):
                checkpoint = latest_checkpoint(directory.checkpoints)
                remedy = f"--resume --out {directory.path} continues"
                say(f"the last checkpoint is {checkpoint}; {remedy}")
        raise


def finish(
    job: Job,
    request: TrainRequest,
    directory: RunDirectory,
    plan: Plan,
    prediction: Prediction,
    reports: tuple[WorkerReport, ...],
    lengths: tuple[MeasuredLength, ...],
    say: Log,
) -> TrainResult:
    """Write the measured timeline, the summary and the report."""
    first = reports[0]
    measured_s = mean_s(lengths) or first.measured_s
    samples_per_s = first.samples_per_s * first.measured_s / measured_s
    directory.write_measured(first.timeline)
    summary: dict[str, Any] = {
        "name": directory.path.name,
        "job": job.name,
        "planner": plan.planner,
        "schedule": plan.schedule,
        "workers": request.workers,
        "predicted_s": prediction.iteration_s,
        "measured_s": measured_s,
        "predicted_peak_memory_bytes": list(prediction.peak_memory_bytes),
        "measured_peak_memory_bytes": [reports[d].peak_memory_bytes for d in plan.devices],
        "steps": first.steps,
        "loss": first.loss,
        "samples_per_s": samples_per_s,
    }
    drift = tuple(map(str, first.drifts))
    if first.drifts:
        with notice_if_long(say, "planning again, since ranks or links were slower than planned"):
            again = replanned(job, request, directory, plan, first.drifts)
        drift += (again,)
        summary["drift"] = list(drift)
    for text in drift:
        say(text)
    if first.left_out:
        summary["left_out_steps"] = list(first.left_out)
    if lengths:
        summary["by_length"] = [found.to_json() for found in lengths]
    directory.write_summary(summary)
    return TrainResult(
        steps=first.steps,
        loss=first.loss,
        samples_per_s=samples_per_s,
        predicted_s=prediction.iteration_s,
        measured_s=measured_s,
        verified=first.verified,
        plan=directory.path / "plan.json",
        checkpoint=latest_checkpoint(directory.checkpoints),
        report=write_report(directory.path),
        run_directory=directory.path,
        weights=job.save_weights,
        by_length=lengths,
        left_out_steps=first.left_out,
        drift=drift,
    )


def replanned(
    job: Job,
    request: TrainRequest,
    directory: RunDirectory,
    plan: Plan,
    drifts: tuple[Drift, ...],
) -> str:
    """What planning again would bring; a plan that gains enough is written beside the old one."""
    profile, cluster = as_found(plan, *directory.read_costs(), drifts)
    found = new_plan(job, request, profile, cluster, REPLANNING_LIMIT)
    now, then = (predict(job, each, profile, cluster).iteration_s for each in (plan, found))
    again = Replanned(found, now, then)
    if again.gain < LEAST_GAIN:
        return "planning again with these times would bring nothing"
    place = directory.path / "replanned.json"
    write_plan(found, place)
    return f"{again}; to do so: --resume --out {directory.path} --plan {place}"


def in_words(plan: Plan) -> str:
    """A plan in one line: ``layers 0-9 on 3 workers, 10-11 on 1; 8 micro-batches of 2, 1f1b``."""
    stages = ", ".join(
        f"{stage.layers.start}-{stage.layers.stop - 1} on {stage.replicas}" for stage in plan.stages
    )
    return (
        f"layers {stages} worker(s); {plan.micro_batches} micro-batches of "
        f"{plan.micro_batch_size}, {plan.schedule}"
    )
