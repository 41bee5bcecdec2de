"""Starts and stops worker processes on this machine, and reports one message if one fails.

The processes are started by the same interface as in torchrun
(`torch.distributed.elastic.multiprocessing`), with torchrun's environment variables. So a function
written for torchrun runs here unchanged. On Linux workers are forked from a server that has
imported torch once for all launches of this process, since each import takes seconds.
"""

import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.api import RunProcsResult

from penstock import errors
from penstock.errors import (
    SIGNALLED,
    BadInput,
    PenstockError,
    RunFailed,
    SaidByAnotherRank,
    WorkerLost,
    exit_code_of,
    shortened,
)
from penstock.machine import usable_cores
from penstock.runtime.processes.fork_server import ensure_fork_server, environment
from penstock.runtime.processes.stopped import shortage_words, wait_unless_stopped
from penstock.runtime.processes.store import meet, met_at, reaching, serve_store
from penstock.runtime.processes.watch import WATCH
from penstock.torch_internals import processes_of

__all__ = ["LINGER_S", "launch_workers", "long_slices_if_crowded", "threads_per_worker"]

LOOPBACK = "127.0.0.1"

LINGER_S = 1.0
"""Seconds that a failed rank waits before it exits, so that who has failed first is noticed."""

GRACE_S = 1.5
"""How long the other workers have to end when one has failed: by themselves, then by SIGTERM."""

GRACE_AFTER_A_KILL_S = 0.1
"""The same when one was killed: then they have nothing to say, and a run may wait to go on."""

POLL_S = 0.1

TOLD_WITHIN = timedelta(seconds=5)
"""How long a failing worker tries to reach the launcher."""

LONGEST_CAUSE = 200
"""The most characters of another error in a message."""

IN_MACHINE_CODE = "a library's machine code failed; its standard error may say which"
SIGNAL_HINTS = {
    signal.SIGKILL: "if nobody killed it, memory may have run out: try smaller micro-batches, "
    "recompute or fewer workers",
    signal.SIGSEGV: IN_MACHINE_CODE,
    signal.SIGABRT: IN_MACHINE_CODE,
    signal.SIGBUS: "shared memory may have run out: see how full /dev/shm is",
}
"""What to do about a worker that ended by a signal."""

TORCHRUN_LOGGERS = ("torch.distributed.elastic.multiprocessing", "torch.multiprocessing.spawn")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a failing worker puts into the store for the launcher."""

    rank: int
    time_s: float
    kind: str
    message: str


def threads_per_worker(workers: int) -> int:
    """Compute threads for each of ``workers`` processes that share the cores of this machine."""
    return max(1, usable_cores() // workers)


def launch_workers(
    function: Callable[..., Any],
    arguments: tuple[Any, ...] = (),
    *,
    workers: int,
    threads: int = 0,
    log_directory: Path | None = None,
    shutdown_s: float = 5.0,
    drains: bool = False,
    imports: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Run ``function(*arguments)`` in ``workers`` processes and return their results by rank.

    Each worker has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, so that
    ``torch.distributed.init_process_group("gloo")`` works. ``function`` must be importable.
    ``threads`` is the number of compute threads of each worker (0: the cores divided evenly). When
    one worker fails, or this process is interrupted, all are stopped within ``shutdown_s`` seconds.
    When this process dies, the kernel stops them. With ``drains`` the first SIGTERM is passed on to
    the workers, which end by themselves. Tracebacks go to ``log_directory``. On Linux workers are
    forked from a server that has imported torch, and ``imports`` if this launch starts it; they get
    the current environment.

    Raises:
        BadInput: fewer than one worker.
        PenstockError: a worker raised this error.
        WorkerLost: a worker was killed.
        Stalled: a worker has been stopped by a signal for two minutes.
        RunFailed: a worker raised another error.
        KeyboardInterrupt: Ctrl-C, after the workers were stopped.
    """
    if workers < 1:
        raise BadInput(f"workers is {workers}; at least 1 is needed")
    threads = threads or threads_per_worker(workers)
    store = serve_store(LOOPBACK)
    with log_files(log_directory) as directory, quiet_torchrun(), restored_signals():
        call = (function, arguments, threads, directory, OwnOutput())
        try:
            ensure_fork_server(imports)
            context = start(call, workers, store.port, threads)
        except SignalException as interruption:
            raise interrupted(interruption) from None
        except (EOFError, ConnectionError) as lost:
            raise RunFailed(
                "the server that forks the workers was killed while it started them; run it again"
            ) from lost
        except OSError as cause:
            words = shortage_words(cause) or str(cause)
            raise RunFailed(f"{workers} workers cannot be started: {words}") from cause
        # Torch would wait 30 s for a worker that does not end by SIGTERM, as one that is stopped.
        processes = processes_of(context)
        if drains and threading.current_thread() is threading.main_thread():
            pass_on_first_sigterm(context)
        processes.join = partial(join_soon, processes.processes, processes.join)
        try:
            result = wait_unless_stopped(partial(context.wait, period=POLL_S), context.pids())
        except SignalException as interruption:
            raise interrupted(interruption) from None
        finally:
            stop(context, shutdown_s)
            # It refers to its own object, whose pipes would stay open until Python looks for such.
            del processes.join
        if result.is_failed():
            raise root_cause(result, workers, store, directory)
    return tuple(result.return_values[rank] for rank in range(workers))


@contextmanager
def log_files(given: Path | None) -> Iterator[Path]:
    """Within, the directory of the workers' tracebacks, cleared of those of an earlier launch.

    A temporary directory is removed afterwards, unless an error names a traceback in it.
    """
    directory = given or Path(tempfile.mkdtemp(prefix="penstock-workers-"))
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("worker-*"):
        stale.unlink()
    named = False
    try:
        yield directory
    except PenstockError as error:
        named = str(directory) in str(error)
        raise
    finally:
        if given is None and not named:
            shutil.rmtree(directory, ignore_errors=True)


def start(call: tuple[Any, ...], workers: int, port: int, threads: int) -> PContext:
    """Start the processes with the environment variables of torchrun."""
    forks = sys.platform == "linux"
    # Forked workers have the server's environment, which may be older than this process's.
    common = dict(os.environ) | {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": str(threads),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Gloo would choose the interface of the host's name, which others may reach.
        common.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = range(workers)
    # OpenMP reads its variable when torch is first imported, before `worker_main` runs. Workers
    # that are not forked must inherit it.
    with environment("OMP_NUM_THREADS", str(threads)):
        return start_processes(
            name="penstock",
            entrypoint=worker_main,
            args={rank: (rank, *call) for rank in ranks},
            envs={rank: common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks},
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            start_method="forkserver" if forks else "spawn",
        )


def join_soon(
    processes: Sequence[BaseProcess], join: Callable[..., bool], timeout: float | None = None
) -> bool:
    """Torch's ``join`` of its processes, with time for the others to end when one has failed."""
    killed = any((process.exitcode or 0) < 0 for process in processes)
    return join(timeout, GRACE_AFTER_A_KILL_S if killed else GRACE_S)


def pass_on_first_sigterm(context: PContext) -> None:
    """Pass the first SIGTERM to the workers, which end by themselves; a second one stops them."""
    stops = signal.getsignal(signal.SIGTERM)

    def pass_on(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, stops)
        for process in context.pids().values():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)


def stop(context: PContext, shutdown_s: float) -> None:
    """Kill the workers that have not ended; Ctrl-C is ignored from now on."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    context.close(signal.SIGKILL, timeout=max(1, round(shutdown_s)))


def worker_main(
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    threads: int,
    log_directory: Path,
    output: object,
) -> Any:
    """The main function of each process: runs ``function``, writes failures for the launcher."""
    die_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    long_slices_if_crowded()
    torch.set_num_threads(threads)
    WATCH.joins_within_s = 0.0  # all workers were forked at the same time
    WATCH.give_up = partial(end_with, rank=rank, log_directory=log_directory)
    try:
        # From now on the other workers see whether this one is alive.
        met_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        return function(*arguments)
    except BaseException as failure:
        end_with(failure, rank, log_directory)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def end_with(failure: BaseException, rank: int, log_directory: Path) -> None:
    """Tell the launcher the failure, and end this process."""
    if not isinstance(failure, SaidByAnotherRank):
        write_failure(failure, rank, log_directory)
    # A worker whose peer was killed also fails; the killed peer must be noticed first.
    time.sleep(LINGER_S)
    sys.stderr.flush()
    os._exit(exit_code_of(failure))


def long_slices_if_crowded() -> None:
    """If this host has more ranks than cores, let each compute longer without a change."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > usable_cores():
        compute_in_long_slices()


def die_with_launcher() -> None:
    """Make the kernel kill this process when the launcher ends for any reason (Linux)."""
    launcher = parent_process()
    if launcher is None:
        return
    if sys.platform == "linux":
        # Only the launcher holds the other end of this pipe open.
        pipe = launcher.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not launcher.is_alive():
        os._exit(1)


def compute_in_long_slices() -> None:
    """Prevent that a worker which becomes ready interrupts one that computes (Linux).

    If workers share cores, every interruption evicts caches, which costs some percent of the time.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class OwnOutput:
    """Makes the output of the process that unpickles it that of the process that has pickled it.

    A fork's output is that of the server, which may have been started before this process
    redirected its own.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return take_output, tuple((number, DupFd(number)) for number in (1, 2))


def take_output(*streams: tuple[int, Any]) -> None:
    """Use each of the given handles as the standard stream of its number."""
    for number, given in streams:
        handle = given.detach()
        os.dup2(handle, number)
        os.close(handle)


def write_failure(failure: BaseException, rank: int, log_directory: Path) -> None:
    """Tell the launcher the failure in a line, and write the traceback for the user.

    The line goes through the store, because the disk may be full; if the store cannot be reached,
    it goes to a file.
    """
    trace = log_directory / f"worker-{rank}-traceback.txt"
    place = f"the traceback is in {trace}"
    try:
        trace.write_text("".join(traceback.format_exception(failure)))
    except OSError as cause:
        place = f"there is no traceback in {trace} ({cause.strerror})"
    if isinstance(failure, PenstockError):
        kind, message = type(failure).__name__, str(failure)
    elif exit_code_of(failure) > SIGNALLED:
        kind, message = SystemExit.__name__, str(exit_code_of(failure))
    else:
        frame = traceback.extract_tb(failure.__traceback__)[-1]
        text = shortage_words(failure) or str(failure).strip().partition("\n")[0]
        kind = RunFailed.__name__
        message = (
            f"worker {rank}: {type(failure).__name__}: {shortened(text, LONGEST_CAUSE)} "
            f"({frame.filename}:{frame.lineno}); {place}"
        )
    record = {"rank": rank, "time_s": time.time(), "kind": kind, "message": message}
    text = json.dumps(record)
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        # Torch would print 50 lines about a connection that fails.
        socket.create_connection((address, int(port)), TOLD_WITHIN.total_seconds()).close()
        store, _, _ = meet(address, port, TOLD_WITHIN)
        store.set(failure_key(rank), text)
    except (OSError, RuntimeError):  # the launcher has ended, or the link to it is cut
        with suppress(OSError):
            failure_file(log_directory, rank).write_text(text)


def failure_file(log_directory: Path, rank: int) -> Path:
    """Where a worker writes its failure if it cannot reach the store."""
    return log_directory / f"worker-{rank}-failure.json"


def failure_key(rank: int) -> str:
    """The name of a worker's failure in the store."""
    return f"penstock/worker/{rank}/failure"


def root_cause(
    result: RunProcsResult, workers: int, store: Any, log_directory: Path
) -> PenstockError | SystemExit:
    """The first failure: a killed worker if there is one, else the earliest that was told."""
    for rank, failure in result.failures.items():
        if failure.exitcode < 0:
            number = signal.Signals(-failure.exitcode)
            return WorkerLost(
                f"worker {rank} (process {failure.pid}) was killed by {number.name} and the others "
                f"were stopped; {SIGNAL_HINTS.get(number, 'resume the run from its checkpoint')}"
            )
    records = failures_told(workers, store, log_directory)
    if not records:
        rank, failure = next(iter(result.failures.items()))
        return RunFailed(
            f"worker {rank} (process {failure.pid}) ended with exit code {failure.exitcode} "
            f"without a message; run it again and look at its standard error"
        )
    first = min(records, key=lambda failure: failure.time_s)
    if first.kind == SystemExit.__name__:
        return SystemExit(int(first.message))
    return getattr(errors, first.kind, RunFailed)(first.message)


def failures_told(workers: int, store: Any, log_directory: Path) -> list[Failure]:
    """What the failed workers have told, through the store or, without a link to it, in files."""
    files = [failure_file(log_directory, rank) for rank in range(workers)]
    texts = [file.read_text() for file in files if file.exists()]
    # If a worker could not reach the store, this process may not reach it either.
    if not texts:
        keys = [failure_key(rank) for rank in range(workers)]
        with reaching():
            texts = [store.get(key) for key in keys if store.check([key])]
    return [Failure(**json.loads(text)) for text in texts]


def interrupted(interruption: SignalException) -> BaseException:
    """The exception for a signal: KeyboardInterrupt for Ctrl-C, else an exit with its code."""
    if interruption.sigval == signal.SIGINT:
        return KeyboardInterrupt()
    return SystemExit(128 + interruption.sigval)


@contextmanager
def restored_signals() -> Iterator[None]:
    """Afterwards, restore the signal handlers that torchrun's interface replaces (main thread)."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def quiet_torchrun() -> Iterator[None]:
    """Within, silence torchrun's own log of a failure (a traceback of 60 lines)."""
    loggers = [logging.getLogger(name) for name in TORCHRUN_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
