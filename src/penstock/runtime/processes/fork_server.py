"""Start the server that workers of this process are forked from, without importing torch here.

The server imports torch once for all launches, since each import takes seconds. A command that will
launch workers starts it first, and imports torch itself meanwhile. The server imports this module
too.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

from penstock.errors import BadInput, shortened

IMPORTED_ONCE = ("penstock.runtime.processes.launch", "penstock.runtime.pipeline")
"""The modules that the server imports; they must start no threads and use no devices."""

SOCKET_FOLDER = "PENSTOCK_SOCKET_FOLDER"
"""Environment variable with the process that starts the server, and its socket's folder."""


def begin_fork_server(imports: Sequence[str]) -> None:
    """Start the server of a command, before the command has imported what it needs itself.

    Ctrl-C is for the command alone: the server and its forks do not see it. One that comes
    meanwhile is kept for the command. The server ends with the command, also where it has not yet
    imported everything.
    """
    # Where it does not run, the server would start it, which lets Ctrl-C through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        ensure_fork_server(imports)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    atexit.register(end_fork_server)


def end_fork_server() -> None:
    """End the server at once; this process removes the folder of its socket."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGTERM)


def ensure_fork_server(imports: Sequence[str] = ()) -> None:
    """Start the server that workers are forked from, if it does not run; on Linux only.

    ``imports`` are modules that it imports too; they must start no threads and use no devices.
    """
    if sys.platform != "linux":
        return
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    users = server._preload_modules
    forkserver.set_forkserver_preload([__name__, *IMPORTED_ONCE, *imports])
    # Libraries must not start threads at import, before a fork. And torch warns, when memory is
    # measured, that it has not seen all allocations.
    quiet = environment("TORCH_CPP_LOG_LEVEL", os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"))
    socket_folder = environment(SOCKET_FOLDER, f"{os.getpid()} {util.get_temp_dir()}")
    with environment("OMP_NUM_THREADS", "1"), quiet, socket_folder:
        try:
            forkserver.ensure_running()
        except OSError as cause:
            if "too long" not in str(cause):
                raise
            folder = tempfile.gettempdir()
            raise BadInput(
                f"the temporary directory '{shortened(folder, 200)}' has {len(folder)} "
                f"characters, too many for a socket in it; set TMPDIR to a shorter one"
            ) from None
        finally:
            server._preload_modules = users


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable; at the end restore it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def say_that_no_worker_started(kind: type, failure: object, _: object) -> None:
    """A fork that cannot start prints one line. Its launcher has ended."""
    sys.stderr.write(f"a worker could not be started ({kind.__name__}: {failure})\n")


starter, _, folder = os.environ.pop(SOCKET_FOLDER, "").partition(" ")
if starter == str(os.getppid()):
    # This is the server. It ends after the process that started it, and removes the folder of its
    # socket where that process was killed and could not.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.excepthook = say_that_no_worker_started
    gc.disable()  # until a fork begins: imports leave hardly any garbage
    from penstock.torch_internals import compiler

    compiler()  # or else each worker would import it, since optimizers do
