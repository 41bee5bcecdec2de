"""The program of every process of a training run that ``penstock train`` or torchrun started.

All ranks measure, unless costs are known. Rank 0 plans, and all train by its plan in the same
processes. Rank 0 alone writes the run directory, except for checkpoints, and prints messages.
If rank 0 fails in work that only rank 0 does, the others exit with its code and print nothing.
"""

import gc
import os
import platform
import re
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from itertools import groupby
from math import inf
from pathlib import Path
from typing import TypeVar, cast

import torch
from rich.console import Console

from penstock.cluster.toml_file import write_cluster
from penstock.device import check_free_memory, release_unused
from penstock.errors import (
    BadInput,
    PenstockError,
    RunFailed,
    SaidByAnotherRank,
    Stalled,
    WorkerLost,
    exit_code_of,
)
from penstock.files import json_text, write_text
from penstock.machine import processor_name, usable_cores, usable_memory_bytes
from penstock.plan.json_file import read_plan
from penstock.plan.plan import Plan, plan_words
from penstock.plan.problem import PlanningProblem
from penstock.planners.find_plan import TimeLimit
from penstock.report.page import write_report
from penstock.report.record import Circumstances, TriedPlan, read_rows
from penstock.runtime.checkpoints.checkpoint import complete_in, latest_checkpoint
from penstock.runtime.checkpoints.weight_saving import check_free
from penstock.runtime.measured_memory import MeasuredMemory
from penstock.runtime.plan_for_ranks import shared_plan
from penstock.runtime.processes.heartbeat import HEARTBEAT, LIMIT_S, say_and_end
from penstock.runtime.processes.launch import LINGER_S, long_slices_if_crowded
from penstock.runtime.processes.store import met_at
from penstock.runtime.processes.world import World, check_environment, join_world
from penstock.runtime.tables import Constraints
from penstock.runtime.trackers import check_trackers
from penstock.text import counted, seconds_text
from penstock.timeline.json_file import write_timeline_json
from penstock.train.data_lengths import mean_s, measured_lengths
from penstock.train.job import GivenGroups, Job
from penstock.train.plan_job import (
    check_model_of_plan,
    check_plan_of_job,
    new_plan,
    other_words,
    pins_left_out,
    predict_step,
    problem_of,
)
from penstock.train.profile_job import cluster_for, cost_job, device_note
from penstock.train.run_directory import RunDirectory, latest_run, new_run
from penstock.train.train_request import Log, TrainRequest, TrainResult
from penstock.train.training_loop import (
    LEAST_LOAD,
    TOLD,
    WARM_UP_STEPS,
    JobRun,
    RunPart,
    Termination,
    TrainedPart,
    train_part,
    wait_limit_s,
)
from penstock.train.trials import plans_to_try, seconds_of_trial
from penstock.waiting import notice_if_long, print_bare_lines, say

T = TypeVar("T")

LOST = WorkerLost, Stalled
"""Errors after which the other workers can continue."""

AFTER_A_LOSS = TimeLimit(2.0, time.perf_counter)
"""The time limit for the plan of the workers that are left, which wait for it."""


def run_local_rank(
    job: Job, request: TrainRequest, history: TrainResult, pause_after: int
) -> TrainResult | None:
    """`run_rank` in a process that `train_job` has started."""
    world = join_world(request.device, LIMIT_S)
    return run_rank(world, job, request, history, pause_after)


def run_started_rank(job: Job, request: TrainRequest) -> TrainResult | None:
    """`run_rank` in a process that torchrun or srun has started; only rank 0 has a result.

    The number of ranks that were started takes the place of ``request.workers``. A start after a
    failure, or after hosts have come or gone, resumes the run that this launch has begun.
    """
    with saying_once():
        long_slices_if_crowded()
        world = join_world(request.device, LIMIT_S)
        own_request = replace(
            request, workers=world.size, resume=request.resume or goes_on(request)
        )
        show = say if request.shown and not world.rank else ignore
        what = f"'{job.name}' with {job.steps} steps of {job.batch_size} samples"
        facts = world.all_gather((socket.gethostname(), versions() | {"the job": what}))

        def checked() -> TrainRequest:
            check_equal(facts)
            if request.may_lose:
                raise BadInput(
                    f"--may-lose is {request.may_lose}, but torchrun or srun has started the ranks "
                    f"and starts them again; leave it out and give torchrun --max-restarts"
                )
            return checked_request(job, own_request, show, may_idle=True)

        first = by_first(world, checked)
        place = world.broadcast(str(first.out.absolute()) if first and first.out else "")
        own_request = first or replace(own_request, out=Path(place))
        said = last_checkpoint_said(RunDirectory(Path(place)), show, goes_on=False)
        with ExitStack() if world.rank else said:
            return run_rank(world, job, own_request, TrainResult(), 0)


def run_rank(
    world: World, job: Job, request: TrainRequest, history: TrainResult, pause_after: int
) -> TrainResult | None:
    """Train ``job`` as one of the ranks of ``world``; every rank must call this.

    ``request`` names the run directory. ``history`` is what has happened before. With
    ``pause_after`` the run pauses at the checkpoint of this number, so that lost workers take their
    places again. Rank 0 returns the result of the run; if it pauses, all return its history.
    """
    print_bare_lines()
    termination = Termination()
    assert request.out is not None
    directory = RunDirectory(request.out)
    with ExitStack() as held:
        by_first(world, lambda: held.enter_context(directory.held()))
        given = by_first(world, lambda: read_plan(request.plan) if request.plan else None)
        if given := shared_plan(world, given):
            job = with_groups_of(given, job)
        show = say if request.shown and not world.rank else ignore
        known = circumstances_of(world, request)
        run = JobRun(world, directory, job, request, show, known, history, pause_after)
        check_seen(world, directory.path)
        until = directory.schedule.get("falls_until", job.optimizer.schedule_steps)
        own = replace(job.optimizer, schedule_steps=until)
        result = run_parts(replace(run, job=replace(job, optimizer=own)), termination, given)
    # A rank that fails does not leave: others would see that before it has reported why.
    world.leave()
    return result


def run_parts(run: JobRun, termination: Termination, given: Plan | None) -> TrainResult | None:
    """Measure, then plan and train until the run ends or pauses; see `run_rank`.

    ``given`` is the plan of the first part.
    """
    world = run.world
    again = run.job.constraints.remeasure and not (run.history.steps or run.history.lost_workers)
    costs = costs_of(run, again=again)
    if run.request.tries > 1 and not (run.request.resume or run.request.dry_run):
        run, given = quickest_of_trials(run, costs)
    planned = by_first(world, partial(planned_part, run, costs, given))
    if run.request.dry_run:
        return planned and TrainResult(
            predicted_s=planned.step_s,
            plan=run.directory.path / "plan.json",
            run_directory=run.directory.path,
        )
    plan = shared_plan(world, planned and planned.plan)
    part = planned or RunPart(cast(Plan, plan))
    part = replace(part, **world.broadcast({key: getattr(part, key) for key in TOLD}))
    check_seen(world, run.directory.checkpoints if part.resumes else run.directory.path)
    if not run.history.steps:
        check_rooms(world, part)
    trained = train_part(run, part, termination)
    memory = world.all_gather(trained.memory, MeasuredMemory)
    for rank, found in enumerate(memory):
        if found.reserved_bytes:
            run.say(f"memory of rank {rank}: {found}")
    result = trained.result()
    if any(world.all_gather(termination.requested)) and result.steps < run.job.steps:
        run.say(f"stopped by SIGTERM after step {result.steps}")
        raise SystemExit(128 + signal.SIGTERM)
    if result.paused:
        return result
    return (
        None
        if world.rank
        else write_results(run, part, trained, [one.peak_bytes for one in memory])
    )


def by_first(world: World, act: Callable[[], T]) -> T | None:
    """Call ``act`` on rank 0; its result there, None on others. All ranks must call this."""
    if world.rank:
        if code := world.broadcast(0):
            raise SaidByAnotherRank(code)
        return None
    try:
        result = act()
    except Exception as failure:
        with suppress(RunFailed):
            world.broadcast(exit_code_of(failure))
        raise
    world.broadcast(0)
    return result


def ignore(text: str) -> None:
    """Print nothing."""


def checked_request(job: Job, request: TrainRequest, say: Log, *, may_idle: bool) -> TrainRequest:
    """The request with its run directory, which is made if it is a new one.

    Unless workers ``may_idle``, there must be no more than its plan needs.
    """
    if request.tries > 1 and (request.plan or request.resume):
        given = "--plan" if request.plan else "--resume"
        raise BadInput(
            f"--try {request.tries} chooses the plan of a new run, and with {given} there is a "
            f"plan already; leave out one of them"
        )
    if note := device_note(request.device, request.workers):
        say(note)
    if job.save_weights is not None:
        check_free(job.save_weights)
    if request.plan:
        given = read_plan(request.plan)
        check_plan_of_job(given, job, request.workers, f"plan '{request.plan}'")
        needed = max(given.ranks) + 1
        if needed < request.workers and not may_idle:
            raise BadInput(
                f"plan '{request.plan}' uses {needed} of {request.workers} workers, and the others "
                f"would idle; start {needed} with --workers, or plan for {request.workers}"
            )
        if len(given.ranks) < request.workers:
            say(
                f"plan '{request.plan}' uses {len(given.ranks)} of {request.workers} ranks, and "
                f"the others idle"
            )
        job = with_groups_of(given, job)
    sizes = job.tensor_parallel.ranks
    if sizes and min(sizes) > request.workers:
        raise BadInput(
            f"job '{job.name}': tensor_parallel has groups of {list(sizes)} ranks, but there are "
            f"{request.workers} workers; start at least {min(sizes)} with --workers"
        )
    check_trackers(job.trackers, f"job '{job.name}'")
    directory = (latest_run if request.resume else new_run)(job.name, request.out)
    keep_schedule(directory, job, request, say)
    return replace(request, out=directory.path)


def keep_schedule(directory: RunDirectory, job: Job, request: TrainRequest, say: Log) -> None:
    """Keep until which step the learning rate falls, as a run that is resumed has begun."""
    own, choice = job.optimizer.schedule_steps, request.lr_schedule
    kept = directory.schedule if request.resume else {}
    until = own or kept.get("falls_until", job.steps)
    if kept and not own and job.optimizer.schedule == "cosine" and job.steps > kept["end"]:
        if not choice:
            raise BadInput(
                f"the run in '{directory.path}' was to take {kept['end']} steps and is to take "
                f"{job.steps}, and its learning rate falls until step {until}; add --lr-schedule "
                f"keep, and it stays as low, or --lr-schedule stretch, and it falls until the end"
            )
        until = until if choice == "keep" else job.steps
        say(f"--lr-schedule {choice}: the learning rate falls until step {until}")
    directory.write_schedule(max(job.steps, kept.get("end", 0)), until)


def with_groups_of(plan: Plan, job: Job) -> Job:
    """The job with the sizes of the tensor groups of ``plan``, so that their costs are measured."""
    sizes = tuple(sorted({len(group) for group in plan.tensor_groups} - {1}))
    own = job.tensor_parallel
    return replace(job, tensor_parallel=GivenGroups(sizes, own.layers, own.function))


def goes_on(request: TrainRequest) -> bool:
    """Return whether torchrun has started the ranks again, after the run had been planned.

    Its count of restarts stays the same when hosts come and go; then the launch's name shows it.
    """
    if request.out is None:
        return False
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    directory = RunDirectory(request.out)
    return (again and directory.is_planned) or directory.is_of_this_launch


def versions() -> dict[str, str]:
    return {
        "penstock": version("penstock"),
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }


def circumstances_of(world: World, request: TrainRequest) -> Circumstances:
    """Facts about the machine and this start of the run, for the report."""
    return Circumstances(
        began=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        command=request.command,
        host=socket.gethostname(),
        hosts=len(set(world.hosts)),
        processor=processor_name(),
        cores=usable_cores(),
        memory_bytes=usable_memory_bytes(),
        load_before=os.getloadavg()[0],
        versions=versions(),
    )


def check_equal(facts: Sequence[tuple[str, dict[str, str]]]) -> None:
    """Raise `BadInput` if a rank differs from rank 0, naming its host and what differs."""
    first_host, expected = facts[0]
    for rank, (host, found) in enumerate(facts):
        for thing, first in expected.items():
            if (own := found.get(thing, "none")) != first:
                raise BadInput(
                    f"rank {rank} on host '{host}' has {thing} {own}, but rank 0 on host "
                    f"'{first_host}' has {first}; install and start the same on all hosts"
                )


def check_seen(world: World, path: Path) -> None:
    """Check that every rank sees a path of rank 0; all must call this."""
    hosts = world.all_gather("" if path.exists() else socket.gethostname())

    def refuse() -> None:
        for host in filter(None, hosts):
            raise BadInput(
                f"host '{host}' has no '{path}'; put the run directory on a disk that all hosts "
                f"share, and name it with --out"
            )

    by_first(world, refuse)


def costs_of(run: JobRun, *, again: bool) -> PlanningProblem | None:
    """Profile and cluster, measured now or by the run that is resumed; only rank 0 has them.

    They are measured ``again`` whatever there is.
    """
    world = run.world
    places = world.all_gather((socket.gethostname(), os.environ.get("GROUP_RANK", "")))
    layout = tuple(len(list(ranks)) for _, ranks in groupby(places))
    known = by_first(world, lambda: None if again else known_costs(run, layout))
    if world.broadcast(known is not None):
        return known
    HEARTBEAT.phase = "measures the layers"
    run.say(f"measuring the layers of '{run.job.name}' and the links between workers")
    start_s = time.perf_counter()
    costs = cost_job(world, run.job, run.request.device)
    gc.collect()
    if costs:
        run.directory.write_costs(costs.profile, costs.cluster)
        seconds = time.perf_counter() - start_s
        run.say(f"measured {counted(len(costs.profile.layers), 'layer')} in {seconds:.1f} s")
        for text in costs.profile.notes:
            run.say(text)
    return costs


def known_costs(run: JobRun, layout: Sequence[int]) -> PlanningProblem | None:
    """Costs measured on as many ranks of as many hosts as ``layout`` has; None if there are none.

    Layers and links of a single host's CPUs stay, whatever the number of its ranks.
    """
    directory = run.directory
    if not directory.is_costed:
        return None
    profile, cluster = directory.read_costs()
    before = tuple(len(host.devices) for host in cluster.hosts)
    if profile.tensor_parallel is None and run.job.tensor_parallel.is_wanted:
        return None
    if before != layout:
        one_host = len(before) == len(layout) == 1
        if not one_host or run.request.device != "cpu" or before[0] == 1:
            return None
        cluster = cluster_for(layout[0], cluster.hosts[0])
        write_cluster(cluster, directory.path / "cluster.toml")
    return problem_of(run.job, profile, cluster)


def planned_part(run: JobRun, costs: PlanningProblem | None, given: Plan | None) -> RunPart:
    """Plan the next part of the run where that is not done yet, and predict its steps."""
    assert costs is not None
    HEARTBEAT.phase = "plans"
    job, directory, request = run.job, run.directory, run.request
    resumes = request.resume and has_checkpoint(directory, run.say)
    with notice_if_long(run.say, "planning"):
        plan = given or plan_for(run, costs)
    check_plan_of_job(plan, job, run.world.size, f"the plan of '{directory.path}'")
    check_model_of_plan(plan, costs.profile)
    directory.write_plan(plan, run.world.size)
    with notice_if_long(run.say, "simulating a step of the plan"):
        prediction, by_length = predict_step(job, plan, costs)
        # Without constraints a whole search more: a run begins before that would end.
        quick = job.constraints == Constraints() or request.dry_run
        other = other_words(job, plan, costs) if quick else ""
    write_timeline_json(prediction.timeline, directory.path / "predicted.json")
    step = f"predicted {seconds_text(prediction.iteration_s)} a step"
    if costs.profile.other_load > LEAST_LOAD:
        longer = f"{100 * costs.profile.other_load:.0f} % longer"
        step += f", beside other programs, with which work takes {longer}"
    idle = 0 if request.plan else run.world.size - len(plan.ranks)
    waits = f"{counted(idle, 'worker')} would not make it faster and will wait" if idle else ""
    run.say("; ".join(filter(None, (f"plan: {plan_words(plan, 'worker')}", step, other, waits))))
    # A checkpoint contains all weights.
    needless = resumes and job.weights and not Path(job.weights.directory).exists()
    return RunPart(
        plan,
        float(prediction.iteration_s),
        tuple(map(float, prediction.peak_memory_bytes)),
        resumes,
        loads_weights=not needless,
        timeline=prediction.timeline,
        by_length=by_length,
        other_load=costs.profile.other_load,
    )


def plan_for(run: JobRun, costs: PlanningProblem) -> Plan:
    """The plan that the resumed run has kept for as many ranks and these costs, or a new one."""
    if not run.request.resume or run.job.constraints.remeasure:
        run.directory.forget_plans()
    kept = run.directory.kept_plan(run.world.size)
    if kept is not None and kept.global_batch == run.job.batch_size:
        return kept
    remeasures = run.job.constraints.remeasure
    if run.request.resume and not (run.history.lost_workers or remeasures):
        run.say("the run gets a new plan, because its hosts, its workers or the batch size changed")
    for pin in pins_left_out(run.job, costs):
        run.say(f"the constraint '{pin}' is left out: there are {run.world.size} workers")
    limit = AFTER_A_LOSS if run.history.lost_workers else None
    return new_plan(run.job, costs, limit)


def quickest_of_trials(run: JobRun, costs: PlanningProblem | None) -> tuple[JobRun, Plan | None]:
    """The run and its quickest plan, after a short trial of each that is near the best.

    If all fail, the run continues with the first, and ends with its error.
    """
    world, job = run.world, run.job

    def predicted() -> list[tuple[Plan, float]]:
        assert costs is not None
        HEARTBEAT.phase = "plans"
        run.directory.forget_plans()
        with notice_if_long(run.say, "planning"):
            plans = plans_to_try(job, run.request, costs)
            own = [predict_step(job, plan, costs)[0] for plan in plans]
        return [(plan, float(each.iteration_s)) for plan, each in zip(plans, own, strict=True)]

    plans = by_first(world, predicted) or []
    seconds = world.broadcast([step_s for _, step_s in plans])
    if len(seconds) == 1:
        run.say("no other plan is predicted to be nearly as fast, so none is tried")
        return run, plans[0][0] if plans else None
    found = dict[Plan, TriedPlan]()
    for number, step_s in enumerate(seconds):
        plan = cast(Plan, shared_plan(world, plans[number][0] if plans else None))
        words = plan_words(plan, "worker")
        run.say(f"trying plan {number + 1} of {len(seconds)}: {words}")
        limit_s = wait_limit_s(step_s)
        measured = seconds_of_trial(world, job, plan, run.request.device, limit_s)
        found[plan] = TriedPlan(words, step_s, *measured)
    ranked = sorted(found, key=lambda plan: found[plan].measured_s or inf)
    tried = tuple(found[plan] for plan in ranked)
    for words, *times in (("plan", "predicted", "measured"), *(each.cells for each in tried)):
        run.say(f"  {times[0]:>9}  {times[1]:>9}  {words}")
    return replace(run, history=replace(run.history, tried=tried)), ranked[0]


def has_checkpoint(directory: RunDirectory, say: Log) -> bool:
    """Return True if the run has a checkpoint; print a line if it has none."""
    if complete_in(directory.checkpoints):
        return True
    say(f"'{directory.path}' has no checkpoint yet; training starts at the first step")
    return False


def check_rooms(world: World, part: RunPart) -> None:
    """Check that the plan's ranks fit into what is free of their GPUs; all must call this."""
    places = list(zip(world.hosts, world.devices, strict=True))
    own = [part.plan.device_of(r) for r, at in enumerate(places) if at == places[world.rank]]
    wanted = sum(part.peaks[device] for device in own if device >= 0)
    # Ranks that share a GPU have measured on it, too.
    world.all_succeed(lambda: release_unused(world.device))
    world.all_succeed(lambda: check_free_memory(world.device, wanted, "the plan"))


def write_results(
    run: JobRun, part: RunPart, trained: TrainedPart, peaks: Sequence[float]
) -> TrainResult:
    """Write the measured timeline, the summary and the report."""
    job, directory, plan, found = run.job, run.directory, part.plan, trained.result()
    rows = read_rows(directory.metrics, damaged=False)
    lengths = measured_lengths(part.by_length, rows, trained.start + WARM_UP_STEPS)
    measured_s = mean_s(lengths) or found.measured_s
    write_timeline_json(trained.timeline(), directory.path / "measured.json")
    result = replace(
        found,
        samples_per_s=found.samples_per_s * found.measured_s / measured_s,
        predicted_s=part.step_s,
        measured_s=measured_s,
        plan=directory.path / "plan.json",
        checkpoint=latest_checkpoint(directory.checkpoints),
        run_directory=directory.path,
        weights=job.save_weights,
        by_length=lengths,
    )
    if trained.data_ended:
        run.say(
            f"the data of job '{job.name}' ended after {result.steps} of {job.steps} steps, and "
            f"the training with them; give data for all steps, or set steps = {result.steps}"
        )
    if result.drift:
        again = f"--resume --out {directory.path} --plan PLAN"
        run.say(f"{result.drift[0]}; measure and plan again, and continue with {again}")
    numbers = asdict(result)
    always = ("steps", "loss", "samples_per_s", "predicted_s", "measured_s")
    where_any = {
        "busy": result.busy,
        "data_ended_after": result.steps if trained.data_ended else 0,
        **{key: list(numbers[key]) for key in ("tried", "drift", "left_out_steps", "by_length")},
    }
    summary = {
        "name": directory.path.name,
        "job": job.name,
        "planner": plan.planner,
        "schedule": plan.schedule,
        "workers": run.world.size,
        "predicted_peak_memory_bytes": list(part.peaks),
        "measured_peak_memory_bytes": [peaks[rank] for rank in plan.ranks],
        "circumstances": asdict(replace(run.circumstances, load_during=os.getloadavg()[0])),
        **{key: numbers[key] for key in always},
        **{key: value for key, value in where_any.items() if value},
    }
    write_text(directory.path / "summary.json", json_text(summary))
    return replace(result, report=write_report(directory.path))


@contextmanager
def last_checkpoint_said(directory: RunDirectory, say: Log, *, goes_on: bool) -> Generator[None]:
    """Print how to resume the run if the block fails, unless the run ``goes_on`` by itself."""
    try:
        yield
    except BaseException as failure:
        # The live display of a worker that was stopped has left it hidden.
        Console(stderr=True).show_cursor()
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


@contextmanager
def saying_once() -> Generator[None]:
    """Let only the first rank that fails, of those that torchrun has started, report the error."""
    check_environment()
    store, rank, _ = met_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])

    def is_first() -> bool:
        first = str(rank)
        with suppress(RunFailed):
            first = store.compare_set("penstock/said", "", str(rank)).decode()
        return first == str(rank)

    def give_up(failure: RunFailed) -> None:
        if is_first():
            say_and_end(failure)
        os._exit(failure.exit_code)

    HEARTBEAT.give_up = give_up
    try:
        yield
    except SystemExit:
        raise
    except BaseException as failure:
        if isinstance(failure, SaidByAnotherRank) or not is_first():
            # When one has ended, torchrun ends the others.
            time.sleep(LINGER_S)
            raise SaidByAnotherRank(exit_code_of(failure)) from failure
        named = re.search(r"\brank \d", str(failure))
        if rank and isinstance(failure, PenstockError) and not named:
            host = socket.gethostname()
            raise type(failure)(f"rank {rank} on host '{host}': {failure}") from None
        raise
