"""``penstock profile``, ``train``, ``verify``, ``report`` and ``list``: jobs and their runs."""

import shlex
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from typer import Argument, Option

from penstock.commands import options
from penstock.commands.terminal import Terminal
from penstock.errors import BadInput, RunFailed
from penstock.machine import without_collecting
from penstock.waiting import notice_if_long

if TYPE_CHECKING:
    from penstock.train.train import TrainResult

LOADING = "loading PyTorch"


@contextmanager
def loading(note: Callable[[str], None]) -> Generator[None]:
    """Print a note if the imports in the block take long; they leave hardly any garbage.

    Ctrl-C counts, too, where a module takes it for a failure of an import of its own.
    """
    pressed: list[int] = []

    def press(number: int, frame: object) -> NoReturn:
        pressed.append(number)
        raise KeyboardInterrupt

    watches = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if watches:
        signal.signal(signal.SIGINT, press)
    try:
        with notice_if_long(note, LOADING), without_collecting():
            yield
    finally:
        if watches:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def profile(
    *,
    job: options.JobName,
    changes: options.Changes = None,
    device: options.Device = "cpu",
    estimate: Annotated[
        str,
        Option(
            metavar="KIND",
            help="Estimate for this GPU, such as H100-80GB or a TOML file, instead of measuring.",
        ),
    ] = "",
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        Option(help="Estimate with weights and products of this type (default: the job's)."),
    ] = None,
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Measure or estimate the layers of JOB's model; -o writes that.

    An estimate needs neither the device nor text, and a model of any size: it has no values.
    """
    from penstock.measure.hardware import hardware_named
    from penstock.train.job_file import checked_table, job_of

    terminal.check_places(out)
    if estimate:
        hardware_named(estimate)
    elif precision:
        raise BadInput("--precision is for --estimate; to measure, write --set autocast=bfloat16")
    checked = checked_table(job, changes or ())
    with loading(terminal.note):
        from penstock.profile.json_file import write_profile
        from penstock.report.tables import profile_table
        from penstock.train.profile_job import device_note, estimate_job, measure_job
        from penstock.train.samples import type_named

    if not estimate:
        device_note(device)
    found = job_of(*checked)
    terminal.note(f"costing the layers of '{job}'")
    if estimate:
        dtype = type_named(options.TYPES[precision]) if precision else None
        costed = estimate_job(found, [estimate], dtype)[0]
        terminal.note(costed.source)
    else:
        costed = measure_job(found, device)
    if out:
        write_profile(costed, out)
    for text in costed.notes:
        terminal.note(text)
    samples, whole = costed.batch_size, range(len(costed.layers))
    values = {
        "layers": len(costed.layers),
        "forward_s": costed.forward_s(whole, samples),
        "backward_s": costed.backward_s(whole, samples),
        "parameter_bytes": costed.parameter_bytes(whole),
        "batch_size": samples,
    }
    terminal.show(values, profile_table(costed))
    terminal.note(f"wrote {out}" if out else "not saved; add -o profile.json")


def train(
    *,
    job: options.JobName = "gpt-text",
    own: options.JobOptions,
    workers: options.Workers = 4,
    plan: options.PlanToFollow = "",
    device: options.Device = "cpu",
    resume: Annotated[bool, Option("--resume", help="Continue from the last checkpoint.")] = False,
    lr_schedule: Annotated[
        Literal["keep", "stretch"] | None,
        Option(help="Keep the old schedule's end, or stretch it, with --resume for more steps."),
    ] = None,
    may_lose: Annotated[
        int,
        Option(
            min=0,
            metavar="N",
            help="Continue while up to N workers are missing, which were killed or stopped "
            "answering.",
        ),
    ] = 0,
    tries: Annotated[
        int,
        Option(
            "--try",
            min=1,
            metavar="N",
            help="Try N plans for ten steps each; continue with the quickest.",
        ),
    ] = 1,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the job and the plan that is made; train nothing.")
    ] = False,
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Train JOB on local workers, or under torchrun or srun.

    There it trains on the ranks that these have started. -o is the run directory.
    """
    from penstock.runtime.processes.srun import one_of_several

    started = one_of_several()
    from penstock.runtime.processes.fork_server import begin_fork_server

    if started.ranks == 1:
        # It imports torch while this process does.
        begin_fork_server(["penstock.train.rank_program"])
    from penstock.files import check_folder
    from penstock.train.job_file import checked_table, job_of, key_lines

    terminal = replace(terminal, quiet=terminal.quiet or started.rank > 0)
    for folder in filter(None, (out, own.save_weights) if started.ranks == 1 else ()):
        check_folder(folder)
    table, place = checked_table(job, own.as_changes)
    with loading(terminal.note):
        from penstock.train.rank_program import run_started_rank
        from penstock.train.train import TrainRequest, train_job

    request = TrainRequest(
        workers=workers,
        plan=Path(plan) if plan else None,
        resume=resume,
        lr_schedule=lr_schedule or "",
        out=Path(out) if out else None,
        device=device,
        shown=not terminal.quiet,
        may_lose=may_lose,
        tries=tries,
        dry_run=dry_run,
        command=shlex.join(["penstock", *sys.argv[1:]]),
    )
    run = run_started_rank if started.ranks > 1 else train_job
    result = run(job_of(table, place), request)
    if result is None:  # rank 0 has it
        return
    if dry_run:
        values = {"job": table, "plan": str(result.plan), "predicted_s": result.predicted_s}
        terminal.show(values, *key_lines(table), f"plan       {result.plan}")
    else:
        show_run(result, terminal)


def show_run(result: "TrainResult", terminal: Terminal) -> None:
    values = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(result).items()
        if key not in ("run_directory", "paused")
    }
    error = result.predicted_s / result.measured_s - 1
    left_out = ", ".join(map(str, result.left_out_steps))
    terminal.show(
        values,
        f"{result.steps} steps, loss {result.loss:.3f}, {result.samples_per_s:.1f} samples/s",
        f"iteration {1000 * result.measured_s:.1f} ms, predicted "
        f"{1000 * result.predicted_s:.1f} ms ({100 * error:+.1f} %)",
        *(f"  {length}" for length in result.by_length),
        *([f"left out   steps {left_out} (NaN or infinity)"] if left_out else []),
        *([f"lost       {result.lost_workers} worker(s)"] if result.lost_workers else []),
        f"checkpoint {result.checkpoint}",
        f"report     {result.report}",
        *([f"weights    {result.weights}"] if result.weights else []),
    )


def verify(
    *,
    job: options.JobName,
    changes: options.Changes = None,
    workers: options.Workers = 4,
    plan: options.PlanToFollow = "",
    device: options.Device = "cpu",
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Compare one step of JOB with its model run without Penstock.

    Loss, gradients and buffers are compared. -o writes the result as JSON.
    """
    from penstock.train.job_file import checked_table, job_of

    terminal.check_places(out)
    checked = checked_table(job, changes or ())
    with loading(terminal.note):
        from penstock.train.profile_job import device_note
        from penstock.train.train import verify_job

    if note := device_note(device, workers):
        terminal.note(note)
    found, place = job_of(*checked), Path(plan) if plan else None
    terminal.note(f"comparing '{job}' on {workers} workers with its model, run plainly")
    result = verify_job(found, workers=workers, plan=place, device=device)
    values = {"equal": result.equal, **asdict(result)}
    terminal.save(values, out)
    terminal.show(values, str(result))
    if not result.equal:
        raise RunFailed(f"the pipeline of '{job}' is not known to equal its model: {result}")


def report(
    *,
    run_directory: Annotated[
        str, Argument(metavar="RUN_DIR", help="Read this run directory of 'penstock train'.")
    ],
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Build the report of a run again; -o writes it elsewhere."""
    from penstock.report.page import write_report

    page = write_report(run_directory, out or None)
    terminal.show({"report": str(page)}, str(page))


def catalogue(*, out: options.Out = "", terminal: Terminal) -> None:
    """List built-in jobs, models, clusters, planners and schedules."""
    from penstock.cluster.toml_file import CLUSTERS
    from penstock.planners.plugins import add_installed
    from penstock.planners.search.search import PLANNERS
    from penstock.profile.built_in import MODELS
    from penstock.schedule.registry import FAMILIES
    from penstock.train import JOBS

    add_installed()
    values: dict[str, list[str]] = {
        "jobs": list(JOBS),
        "models": list(MODELS),
        "clusters": list(CLUSTERS),
        "planners": list(PLANNERS),
        "schedules": list(FAMILIES),
    }
    terminal.save(values, out)
    terminal.show(
        values, *(f"{key:<10} {', '.join(names) or '-'}" for key, names in values.items())
    )
