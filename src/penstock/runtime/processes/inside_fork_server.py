"""Prepares the server that workers are forked from, which alone imports this module.

The server ends after the process that started it. So it removes the folder of its socket where that
process was killed and could not.
"""

import atexit
import os
import shutil
import sys

from penstock.runtime.processes.fork_server import SOCKET_FOLDER

__all__ = ["say_that_no_worker_started"]


def say_that_no_worker_started(kind: type, failure: object, _: object) -> None:
    """A fork that cannot start prints one line. Its launcher has ended."""
    sys.stderr.write(f"a worker could not be started ({kind.__name__}: {failure})\n")


if folder := os.environ.pop(SOCKET_FOLDER, ""):
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.excepthook = say_that_no_worker_started
