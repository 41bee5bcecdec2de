"""Start trainings that are to be broken, and find their processes."""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

HERE = Path(__file__).parent
MARK = "PENSTOCK_CHAOS"
"""Environment variable by which the processes of a run are found."""

APART = "PENSTOCK_CHAOS_APART"
"""Environment variable of a script that has mounts of its own, a new /dev/shm among them."""

OWN_HOSTS = "PENSTOCK_CHAOS_HOSTS"
"""With this variable every rank of the broken job counts as a host of its own."""

ERROR = "PENSTOCK_CHAOS_ERROR"
"""The variable that names a file; while that exists, the data of the broken job raise."""

NEW_NETWORK = 0x40000000
"""The flag of Linux's ``unshare`` for a network namespace."""

END_WITH_PARENT = 1
"""The option of Linux's ``prctl`` by which a process is killed when its parent ends."""


def read(path: str) -> bytes:
    """A file of /proc; empty if its process has ended."""
    with suppress(OSError):
        return Path(path).read_bytes()
    return b""


def marked(mark: str) -> Iterator[int]:
    """The processes that have a mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for found in Path("/proc").glob("[0-9]*/environ"):
        if wanted in read(str(found)).split(b"\0"):
            yield int(found.parent.name)


def stat_of(pid: int) -> list[bytes]:
    """State and parent of a process."""
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:2] or [b"Z", b"0"]


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended, and only its number is left."""
    return stat_of(pid)[0] == b"Z"


def parent_of(pid: int) -> int:
    """The parent of a process."""
    return int(stat_of(pid)[1])


@dataclass(frozen=True)
class Place:
    """The directories of one run: ``disk`` holds the run, ``temporary`` is its TMPDIR."""

    disk: Path
    temporary: Path
    errors: Path

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.disk / "run"

    @property
    def error(self) -> Path:
        """The file that makes the user's data raise an error."""
        return self.errors.with_name("error")

    @property
    def checkpoints(self) -> Path:
        """The run's checkpoints."""
        return self.run / "checkpoints"

    def complete(self) -> list[Path]:
        """The finished checkpoints, oldest first."""
        return sorted(self.checkpoints.glob("step-*"))


def place_in(folder: Path) -> Place:
    """New directories for a run."""
    place = Place(folder / "disk", folder / "temporary", folder / "errors")
    for made in (place.disk, place.temporary):
        made.mkdir(parents=True)
    return place


@dataclass(frozen=True)
class Start:
    """The start of a training.

    ``resume``: go on with the run in ``place``. ``own_hosts``: every rank counts as a host of its
    own, so that messages take the network. ``own_network``: in a network namespace (root only).
    ``as_command``: as a user does, with all imports; else forked from this process, which has
    imported everything.
    """

    job: Path
    ranks: int
    plan: Path | None = None
    options: tuple[str, ...] = ()
    resume: bool = False
    own_hosts: bool = False
    own_network: bool = False
    as_command: bool = False

    def arguments(self, place: Place) -> list[str]:
        """The command after ``penstock``."""
        arguments = ["train", str(self.job), "--workers", str(self.ranks), "-o", str(place.run)]
        arguments += ["--plan", str(self.plan)] if self.plan else []
        return [*arguments, *self.options, *(["--resume"] if self.resume else [])]


class Run:
    """A training that has been started; ``code`` is its exit code once it has ended."""

    def __init__(self, pid: int, place: Place, mark: str) -> None:
        self.pid, self.place, self.mark = pid, place, mark
        self.code: int | None = None

    def is_over(self) -> bool:
        """Return whether its first process has ended."""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, limit_s: float) -> float:
        """Wait for its end, at most ``limit_s``; the seconds that it took."""
        start_s = time.monotonic()
        while not self.is_over() and time.monotonic() - start_s < limit_s:
            time.sleep(0.02)
        return time.monotonic() - start_s

    def send(self, number: signal.Signals) -> None:
        """Send its first process a signal."""
        if not self.is_over():
            os.kill(self.pid, number)

    def said(self) -> str:
        """The output so far."""
        return self.place.errors.read_text(errors="replace")

    def steps(self) -> int:
        """The number of steps that it has recorded."""
        path = self.place.run / "metrics.jsonl"
        return path.read_bytes().count(b'"loss"') if path.exists() else 0

    def writes_checkpoint(self) -> bool:
        """Return whether a checkpoint is half written."""
        return any(self.place.checkpoints.glob(".step-*.partial"))

    def everyone(self) -> list[int]:
        """Its processes, the first one too, without zombies."""
        own = [] if self.is_over() else [self.pid]
        found = {*own, *marked(self.mark)}
        return sorted(pid for pid in found if not is_zombie(pid))

    def servers(self) -> list[int]:
        """The fork server."""
        return [pid for pid in self._served() if parent_of(pid) == self.pid]

    def workers(self) -> list[int]:
        """Its workers: forks of the fork server, which has their command line."""
        served = self._served()
        return [pid for pid in served if parent_of(pid) in served]

    def name_of(self, pid: int) -> str:
        """The part of a process in the run."""
        if pid == self.pid:
            return "run"
        return "worker" if pid in self.workers() else "server"

    def _served(self) -> list[int]:
        found = self.everyone()
        return [pid for pid in found if b"forkserver" in read(f"/proc/{pid}/cmdline")]


def begin(start: Start, place: Place) -> Run:
    """Start a training."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = {MARK: mark, "TMPDIR": str(place.temporary), ERROR: str(place.error)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(place.errors.with_name("inductor"))
    if start.own_hosts:
        environment[OWN_HOSTS] = "1"
    place.errors.write_bytes(b"")
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            become(start, place, environment)
        except BaseException as failure:
            # The driver's own cleaning up must not run here.
            print(f"the training was not started: {failure!r}", file=sys.stderr, flush=True)
            os._exit(99)
    return Run(pid, place, mark)


def become(start: Start, place: Place, environment: dict[str, str]) -> NoReturn:
    """In a new process: become the training."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(place.errors, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(environment)
    system = ctypes.CDLL(None, use_errno=True)
    system.prctl(END_WITH_PARENT, signal.SIGKILL)
    if start.own_network:
        if system.unshare(NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "a network namespace")
        subprocess.run(["ip", "link", "set", "lo", "mtu", "1500", "up"], check=True)
    arguments = start.arguments(place)
    if start.as_command:
        run_main = "from penstock.cli import main; main()"
        os.execv(sys.executable, [sys.executable, "-c", run_main, *arguments])
    from penstock.cli import main

    tempfile.tempdir = None  # TMPDIR has changed
    # Otherwise every worker would import this script.
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["penstock", *arguments]
    os._exit(exit_code(main))


def exit_code(main: Callable[[], None]) -> int:
    """Run a program to its end and clean up after it; its exit code."""
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def in_network_of(pid: int, *command: str) -> bool:
    """Run a command in the network namespace of a process; false if that has ended."""
    entered = ["nsenter", f"--net=/proc/{pid}/ns/net", *command]
    return subprocess.run(entered, check=False, stderr=subprocess.DEVNULL).returncode == 0


def kill_all(pids: Sequence[int]) -> None:
    """Kill processes."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def be_apart() -> None:
    """Start this script again with mounts of its own, if it has root's rights and has none yet."""
    if os.geteuid() != 0:
        return
    if APART not in os.environ:
        os.environ[APART] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
