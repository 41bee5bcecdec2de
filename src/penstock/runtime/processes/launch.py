"""Start and stop worker processes on this machine, and report one message if one fails.

Workers have torchrun's environment variables, so a function written for torchrun runs here
unchanged. On Linux they are forked from a server that has imported torch once for all launches of
this process, since each import takes seconds. A worker sends its result or its failure through a
pipe, which neither a full disk nor a cut link disturbs.
"""

import errno
import fcntl
import gc
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed

from penstock.errors import (
    SIGNALLED,
    BadInput,
    PeerFailed,
    PenstockError,
    RunFailed,
    SaidByAnotherRank,
    Stalled,
    WorkerLost,
    exit_code_of,
    shortened,
)
from penstock.machine import usable_cores
from penstock.runtime.processes.fork_server import ensure_fork_server, environment
from penstock.runtime.processes.heartbeat import HEARTBEAT, LIMIT_S
from penstock.runtime.processes.store import met_at, serve_store

LOOPBACK = "127.0.0.1"

LINGER_S = 1.0
"""Seconds that a rank lingers when another has failed, so that who has failed first is noticed."""

GRACE_S = 1.5
"""Seconds that the other workers have to end by themselves when one has failed."""

GRACE_AFTER_A_KILL_S = 0.1
"""The same when one was killed: then they have nothing to report, and a run may wait to resume."""

LOOK_EVERY_S = 5.0
"""Seconds between two checks of whether a worker is stopped."""

STOPPED_LIMIT_S = LIMIT_S
"""Seconds that a signal may stop a worker."""

UNKNOWN = 255
"""The exit code that a process has for multiprocessing when its fork server has ended."""

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
"""Remedies for a worker that ended by a signal."""


@dataclass(slots=True)
class WorkerProcess:
    """A process; ``exit_code`` is None until it has ended by itself.

    It sends its ``result``, or its ``failure`` and ``time_s``, when that was.
    """

    rank: int
    process: BaseProcess
    pipe: Connection
    pid: int = 0
    exit_code: int | None = None
    time_s: float = inf
    failure: BaseException | None = None
    result: Any = None

    def read(self) -> None:
        """Read what the process has sent, and close the pipe."""
        # A process that has ended may have sent nothing, or only a part.
        with suppress(EOFError, OSError):
            self.time_s, self.failure, self.result = pickle.loads(self.pipe.recv_bytes())
        self.pipe.close()


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
    ``torch.distributed.init_process_group("gloo")`` works. ``function`` must be importable, or come
    from a notebook or a prompt: then it goes to the workers with its code. ``threads`` is the
    number of compute threads of each worker (0: the cores divided evenly). When one worker fails,
    or this process is interrupted, all are stopped within ``shutdown_s`` seconds. When this process
    dies, the kernel stops them. With ``drains`` the first SIGTERM is passed on to the workers,
    which end by themselves. Tracebacks go to ``log_directory``. On Linux workers are forked from a
    server that has imported torch, and ``imports`` if this launch starts it; they get the current
    environment.

    Raises:
        BadInput: fewer than one worker; the function is of a notebook, and cloudpickle is missing.
        PenstockError: a worker raised this error.
        WorkerLost: a worker was killed.
        Stalled: a worker has been stopped by a signal for two minutes.
        RunFailed: a worker raised another error.
        KeyboardInterrupt: Ctrl-C, after the workers were stopped.
    """
    if workers < 1:
        raise BadInput(f"workers is {workers}; at least 1 is needed")
    threads = threads or max(1, usable_cores() // workers)
    function, arguments = with_code(function, arguments)
    store = serve_store(LOOPBACK)
    started: list[WorkerProcess] = []
    with log_files(log_directory) as directory, signals_raised():
        call = (function, arguments, threads, directory, OwnOutput())
        try:
            ensure_fork_server(imports)
            start(started, call, variables_of(workers, store.port, threads))
            if drains and threading.current_thread() is threading.main_thread():
                pass_on_first_sigterm(started)
            await_workers(started)
        finally:
            stop(started, shutdown_s)
        if any(worker.exit_code != 0 for worker in started):
            raise root_cause(started)
    results = (worker.result for worker in started)
    return tuple(map(pickle.loads, results) if function is call_with_code else results)


def with_code(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call; with the code of what workers cannot import, where ``__main__`` is not a file."""
    named = [function, getattr(function, "func", None), *arguments, *map(type, arguments)]
    own = any(getattr(each, "__module__", "") == "__main__" for each in named)
    if not own or hasattr(sys.modules["__main__"], "__file__"):
        return function, arguments
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise BadInput(
            f"'{getattr(function, '__name__', function)}' is defined in a notebook or at a prompt, "
            f"from which workers cannot import it: 'pip install cloudpickle', or define it in a "
            f"module"
        ) from None
    return call_with_code, (cloudpickle.dumps((function, arguments)),)


def call_with_code(call: bytes) -> bytes:
    """Run in a worker what `with_code` was given; the result may be of a notebook's class."""
    import cloudpickle

    function, arguments = pickle.loads(call)
    return cloudpickle.dumps(function(*arguments))


@contextmanager
def log_files(given: Path | None) -> Iterator[Path]:
    """Yield the directory of the workers' tracebacks, cleared of those of an earlier launch.

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


@contextmanager
def signals_raised() -> Generator[None]:
    """Raise an exception in the main thread for signals that request this process to end."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            before[number] = signal.getsignal(number)
            # A command that nohup has started ignores that its terminal is closed.
            if number != signal.SIGHUP or before[number] != signal.SIG_IGN:
                signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(number: int, _: FrameType | None) -> None:
    """Handle a signal: KeyboardInterrupt for Ctrl-C, else an exit with its code."""
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(SIGNALLED + number)


def variables_of(workers: int, port: int, threads: int) -> dict[str, str]:
    """The environment of all workers: this process's, with the variables of torchrun."""
    variables = dict(os.environ) | {
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
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return variables


def start(started: list[WorkerProcess], call: tuple[Any, ...], variables: dict[str, str]) -> None:
    """Start the processes, each of which is added to ``started``."""
    context = get_context("forkserver" if sys.platform == "linux" else "spawn")
    workers = int(variables["WORLD_SIZE"])
    try:
        # OpenMP reads its variable when torch is first imported, before `worker_main` runs. Workers
        # that are not forked must inherit it.
        with environment("OMP_NUM_THREADS", variables["OMP_NUM_THREADS"]):
            for rank in range(workers):
                pipe, end = context.Pipe(duplex=False)
                own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = context.Process(target=worker_main, args=(rank, own, end, *call))
                started.append(WorkerProcess(rank, process, pipe))
                with end:
                    process.start()
                started[rank].pid = process.pid or 0
    except (EOFError, ConnectionError) as lost:
        raise RunFailed(
            "the server that forks the workers was killed while it started them; run it again"
        ) from lost
    except OSError as cause:
        words = shortage_words(cause) or str(cause)
        raise RunFailed(f"{workers} workers cannot be started: {words}") from cause


def pass_on_first_sigterm(workers: Sequence[WorkerProcess]) -> None:
    """Pass the first SIGTERM to the workers, which end by themselves; a second one stops them."""

    def pass_on(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, interrupt)
        for worker in workers:
            if worker.exit_code is None:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, number)

    signal.signal(signal.SIGTERM, pass_on)


def await_workers(workers: Sequence[WorkerProcess]) -> None:
    """Return when all workers have ended, or soon after one has failed.

    Workers that train together notice when a signal has stopped one of them. For one that works
    alone nobody waits, so this looks. Looks are counted, not seconds: where this process is stopped
    too, as by Ctrl-Z, none passes.
    """
    stopped, deadline_s = Counter[int](), inf
    every_s = min(LOOK_EVERY_S, STOPPED_LIMIT_S / 4)
    while running := [worker for worker in workers if worker.exit_code is None]:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        awaited: dict[Any, WorkerProcess] = {worker.process.sentinel: worker for worker in running}
        awaited |= {worker.pipe: worker for worker in running if not worker.pipe.closed}
        ready = wait(list(awaited), min(every_s, left_s))
        for worker in {awaited[each].rank: awaited[each] for each in ready}.values():
            # A child of an ended worker may hold its pipe open.
            if not worker.pipe.closed and worker.pipe.poll():
                worker.read()
            if worker.process.sentinel not in ready:
                continue
            worker.process.join()
            code = worker.process.exitcode
            if code == UNKNOWN and Path(f"/proc/{worker.pid}").exists():
                raise RunFailed(
                    "the server that forks the workers was killed, and the workers were ended; "
                    "run it again"
                )
            worker.exit_code = code
            if worker.exit_code:
                grace_s = GRACE_AFTER_A_KILL_S if worker.exit_code < 0 else GRACE_S
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
        for worker in running if not ready else ():
            stopped[worker.rank] = stopped[worker.rank] + 1 if is_stopped(worker.pid) else 0
            if stopped[worker.rank] * every_s >= STOPPED_LIMIT_S:
                raise Stalled(
                    f"worker {worker.rank} (process {worker.pid}) has been stopped for "
                    f"{STOPPED_LIMIT_S:.0f} s by a signal, as SIGSTOP, and the others were ended; "
                    f"start the run again"
                )


def is_stopped(process: int) -> bool:
    """Return whether a signal has stopped the process (Linux; elsewhere it is not known)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    # The name of the program, in brackets, may hold spaces and brackets itself.
    return fields.rpartition(")")[2].split()[0] == "T"


def stop(workers: Sequence[WorkerProcess], shutdown_s: float) -> None:
    """Kill the workers that have not ended; Ctrl-C is ignored from now on."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    deadline_s = time.monotonic() + shutdown_s
    for worker in workers:
        worker.pipe.close()
        if worker.pid and worker.exit_code is None:
            # Without the fork server `Process.kill` would do nothing.
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
    for worker in workers:
        if worker.pid:
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
            # One that waits in the kernel for a device may end later.
            with suppress(ValueError):
                worker.process.close()


def root_cause(workers: Sequence[WorkerProcess]) -> BaseException:
    """The first failure: a killed worker if there is one, else the earliest that was reported.

    A worker's own failure outranks a report about a peer.
    """
    for worker in workers:
        if worker.exit_code is not None and worker.exit_code < 0:
            number = signal.Signals(-worker.exit_code)
            return WorkerLost(
                f"worker {worker.rank} (process {worker.pid}) was killed by {number.name} and the "
                f"others were stopped; "
                f"{SIGNAL_HINTS.get(number, 'resume the run from its checkpoint')}"
            )
    failed = [worker for worker in workers if worker.exit_code]
    reporting = (worker for worker in workers if worker.failure)
    first = min(
        reporting,
        key=lambda worker: (isinstance(worker.failure, PeerFailed), worker.time_s),
        default=failed[0],
    )
    return first.failure or RunFailed(
        f"worker {first.rank} (process {first.pid}) ended with exit code {first.exit_code} "
        f"without a message; run it again and look at its standard error"
    )


def worker_main(
    rank: int,
    variables: dict[str, str],
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    threads: int,
    log_directory: Path,
    output: object,
) -> None:
    """The main function of each process: runs ``function``, reports its outcome to the launcher."""
    die_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    # What was imported stays: no collection looks at it, or copies its pages from the server.
    gc.freeze()
    gc.enable()
    # Forks have the server's environment, which may be older than the launcher's.
    os.environ.update(variables)
    long_slices_if_crowded()
    torch.set_num_threads(threads)
    end = partial(end_with, rank=rank, pipe=pipe, log_directory=log_directory)
    HEARTBEAT.joins_within_s = 0.0  # all workers were forked at the same time
    HEARTBEAT.give_up = end
    try:
        # From now on the other workers see whether this one is alive.
        met_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        result = pickle.dumps((inf, None, function(*arguments)))
    except BaseException as failure:
        end(failure)
    else:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        pipe.send_bytes(result)


def end_with(failure: BaseException, rank: int, pipe: Connection, log_directory: Path) -> None:
    """Report the failure to the launcher, and end this process."""
    if isinstance(failure, SaidByAnotherRank):
        time.sleep(LINGER_S)
    else:
        report = time.time(), reported(failure, rank, log_directory), None
        with suppress(OSError):  # the launcher has ended
            pipe.send_bytes(pickle.dumps(report))
    sys.stderr.flush()
    os._exit(exit_code_of(failure))


def reported(failure: BaseException, rank: int, log_directory: Path) -> BaseException:
    """The failure in a line for the launcher; writes the traceback for the user."""
    trace = log_directory / f"worker-{rank}-traceback.txt"
    place = f"the traceback is in {trace}"
    try:
        trace.write_text("".join(traceback.format_exception(failure)))
    except OSError as cause:
        place = f"there is no traceback in {trace} ({cause.strerror})"
    if isinstance(failure, PenstockError):
        known = type(failure).__module__ == PenstockError.__module__
        return failure if known else RunFailed(str(failure))
    if exit_code_of(failure) > SIGNALLED:
        return SystemExit(exit_code_of(failure))
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    text = shortage_words(failure) or str(failure).strip().partition("\n")[0]
    return RunFailed(
        f"worker {rank}: {type(failure).__name__}: {shortened(text, LONGEST_CAUSE)} "
        f"({frame.filename}:{frame.lineno}); {place}"
    )


def long_slices_if_crowded() -> None:
    """Lengthen the time slices of this process if its host has more ranks than cores (Linux).

    Otherwise a worker that becomes ready interrupts one that computes, which evicts caches and
    costs some percent of the time.
    """
    crowded = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > usable_cores()
    if crowded and sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


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


class OwnOutput:
    """Output of the process that has pickled it, for the process that unpickles it.

    A fork's output is that of the server, which may have been started before this process
    redirected its own.
    """

    def __getstate__(self) -> tuple[Any, ...]:
        return DupFd(1), DupFd(2)

    def __setstate__(self, given: tuple[Any, ...]) -> None:
        for number, each in enumerate(given, 1):
            handle = each.detach()
            os.dup2(handle, number)
            os.close(handle)


SHARED_MEMORY = "/dev/shm"

ENOUGH_BYTES = 1 << 30
"""Free bytes with which shared memory is not the disk that is full."""


def shortage_words(cause: BaseException) -> str:
    """Describe what ran out, its limit and the remedy; empty for other errors.

    >>> shortage_words(ValueError("no number"))
    ''
    """
    if not isinstance(cause, OSError):
        return ""
    match cause.errno:
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"this process may have {limit} open files, and needs more; allow them with "
                f"'ulimit -n {max(1024, 4 * limit)}'"
            )
        case errno.ENFILE:
            return "the machine has as many open files as it allows; close programs"
        case errno.EAGAIN:
            limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
            return (
                f"this user may have {limit} processes and threads; allow more with 'ulimit -u', "
                f"or use fewer workers"
            )
        case errno.ENOSPC if cause.filename is None and os.path.isdir(SHARED_MEMORY):
            room = shutil.disk_usage(SHARED_MEMORY)
            if room.free > ENOUGH_BYTES:
                return "a disk is full; delete files, or write to another one"
            return (
                f"a disk is full: {SHARED_MEMORY} has {room.free >> 10} KiB free of "
                f"{room.total >> 10} KiB; delete files there that no process uses, or make it "
                f"larger"
            )
        case _:
            return ""
