"""Notices workers of this machine that a signal has stopped.

Workers that train together notice it of one another (`penstock.runtime.processes.watch`). A worker
that measures alone has nobody who waits for it, so its launcher looks.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from penstock.errors import Stalled
from penstock.runtime.processes.watch import LIMIT_S

__all__ = ["wait_unless_stopped"]

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
