"""Load of others on this machine meanwhile: seconds are only comparable without them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = 100


@dataclass
class OtherLoad:
    """Cores that others used, on average."""

    cores: float = 0.0


@contextmanager
def other_load() -> Iterator[OtherLoad]:
    """Measure the load of others while the block runs, without this process and its descendants."""
    load = OtherLoad()
    start_s, busy_s, own_s = time.monotonic(), machine_s(), own_tree_s()
    yield load
    own_s, busy_s = own_tree_s() - own_s, machine_s() - busy_s
    load.cores = max(0.0, busy_s - own_s) / (time.monotonic() - start_s)


def machine_s() -> float:
    """Seconds that all cores together have worked (Linux)."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    idle, waiting = fields[3], fields[4]
    return (sum(fields) - idle - waiting) / TICKS_PER_S


def own_tree_s() -> float:
    """Seconds that this process, its descendants, and those of them that ended, have worked.

    Workers are children of a fork server: `resource.getrusage` does not see them before that ends.
    """
    worked: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, the second field, may hold spaces and brackets.
            fields = entry.read_text().rpartition(")")[2].split()
            process, parent = int(entry.parent.name), int(fields[1])
            worked[process] = sum(map(int, fields[11:15]))
            children.setdefault(parent, []).append(process)
    ticks, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        ticks += worked[process]
        left += children.get(process, [])
    return ticks / TICKS_PER_S
