"""Notices workers of this machine that a signal has stopped.

Workers that train together notice it of one another (`penstock.runtime.processes.watch`). A worker
that measures alone has nobody who waits for it, so its launcher looks.
"""

import errno
import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from penstock.errors import Stalled
from penstock.runtime.processes.watch import LIMIT_S

__all__ = ["shortage_words", "wait_unless_stopped"]

T = TypeVar("T")

LOOK_EVERY_S = 5.0


def wait_unless_stopped(
    wait: Callable[[float], T | None],
    processes: Mapping[int, int],
    limit_s: float = LIMIT_S,
) -> T:
    """What ``wait(seconds)`` returns once that is not None; see ``processes``, by rank, meanwhile.

    Looks are counted, not seconds: where this process is stopped too, as by Ctrl-Z, none passes.

    Raises:
        Stalled: a process has been stopped at every look for ``limit_s`` seconds.
    """
    stopped: Counter[int] = Counter()
    every_s = min(LOOK_EVERY_S, limit_s / 4)
    while (result := wait(every_s)) is None:
        for rank, process in processes.items():
            stopped[rank] = stopped[rank] + 1 if is_stopped(process) else 0
            if stopped[rank] * every_s >= limit_s:
                raise Stalled(
                    f"worker {rank} (process {process}) has been stopped for {limit_s:.0f} s by a "
                    f"signal, as SIGSTOP, and the others were ended; start the run again"
                )
    return result


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped the process (Linux; elsewhere it is not known)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    # The name of the program, in brackets, may hold spaces and brackets itself.
    return fields.rpartition(")")[2].split()[0] == "T"


SHARED_MEMORY = "/dev/shm"

ENOUGH_BYTES = 1 << 30
"""With so much free, shared memory is not the disk that is full."""


def shortage_words(cause: BaseException) -> str:
    """What ran out, its limit and the remedy; empty for other errors.

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
