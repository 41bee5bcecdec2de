"""Memory and cores of this machine that the process may use, under all limits on them.

The kernel, control groups (of both versions, as containers have them) and Slurm each set limits.
The tightest counts. ``root`` is the folder of ``proc`` and ``sys`` everywhere, ``variables`` are
those of the environment.
"""

import gc
import os
import platform
import re
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path

ROOT = Path("/")
MEGABYTE = 1 << 20

PROCESS_LIMITS = (
    ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
)
MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Files of limit and use, and the prefix of sums over descendants: cgroup version 2, version 1."""


@dataclass(frozen=True)
class FreeMemory:
    """The number of ``bytes`` that can be allocated, and the ``limit`` that allows no more."""

    bytes: float
    limit: str


def usable_memory_bytes(root: Path = ROOT, variables: Mapping[str, str] = os.environ) -> float:
    """The memory of this machine that processes like this one share, whether free or not."""
    whole = kilobytes(root / "proc" / "meminfo", "MemTotal")
    if whole is None:
        whole = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    groups = (
        float(limit)
        for folder, version_2 in control_groups("memory", root)
        if (limit := text_of(folder / MEMORY_FILES[0 if version_2 else 1][0])).isdigit()
    )
    of_job = number(variables, "SLURM_MEM_PER_NODE") * MEGABYTE
    each_core = number(variables, "SLURM_MEM_PER_CPU") * MEGABYTE
    of_cores = each_core * number(variables, "SLURM_CPUS_ON_NODE")
    return min([whole, *groups, *(limit for limit in (of_job, of_cores) if limit)])


def usable_cores(root: Path = ROOT, variables: Mapping[str, str] = os.environ) -> int:
    """The cores on which processes like this one compute at the same time; at least 1."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min(bound or 1, granted_cores(root, variables))))


def processor_name(root: Path = ROOT) -> str:
    """The maker's name for the processor, or else its architecture, such as ``aarch64``."""
    model_line = re.search(
        r"^model name\s*: (.+)$", text_of(root / "proc" / "cpuinfo"), re.MULTILINE
    )
    return " ".join(model_line[1].split()) if model_line else platform.machine()


def granted_cores(root: Path = ROOT, variables: Mapping[str, str] = os.environ) -> float:
    """The cores that control groups and Slurm grant, to whichever the process is bound; or inf."""
    granted = [float(number(variables, "SLURM_CPUS_ON_NODE") or inf)]
    for folder, version_2 in control_groups("cpu", root):
        names = ("cpu.max",) if version_2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        limit, _, period = " ".join(text_of(folder / name) for name in names).partition(" ")
        if limit.isdigit() and period.isdigit():
            granted.append(int(limit) / int(period))
    return min(granted)


def core_seconds(root: Path = ROOT) -> tuple[float, float]:
    """Seconds that this thread has run on a core until now, and that it has waited for one.

    The second is 0 where the system does not count it: it is Linux that does.
    """
    counted = text_of(root / "proc" / "thread-self" / "schedstat").split()
    return (int(counted[0]) / 1e9, int(counted[1]) / 1e9) if counted else (time.thread_time(), 0.0)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Disable Python's garbage collector, where it would find nothing or must not be timed."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def free_host_memory(root: Path = ROOT) -> FreeMemory:
    """The free memory under the tightest limit; infinite if the system reports none."""
    # The host's includes caches that it can drop; then the limits on this process (``ulimit``).
    found = [FreeMemory(inf, "")]
    available = kilobytes(root / "proc" / "meminfo", "MemAvailable")
    if available is not None:
        found.append(FreeMemory(available, "free memory of the host"))
    for name, kind, counted in PROCESS_LIMITS:
        limit, _ = resource.getrlimit(kind)
        used = kilobytes(root / "proc" / "self" / "status", counted)
        if limit != resource.RLIM_INFINITY and used is not None:
            found.append(FreeMemory(max(0.0, limit - used), name))
    found += [left for group in control_groups("memory", root) for left in within_group(*group)]
    return min(found, key=lambda free: free.bytes)


def within_group(folder: Path, version_2: bool) -> Iterator[FreeMemory]:
    """The memory left in one control group; cached files count as free, as they can be dropped."""
    limit_file, use_file, prefix = MEMORY_FILES[0 if version_2 else 1]
    limit, used = text_of(folder / limit_file), text_of(folder / use_file)
    if not limit.isdigit() or not used.isdigit():
        return
    cached = re.findall(
        rf"^{prefix}(?:in)?active_file (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE
    )
    left = float(limit) - float(used) + sum(map(float, cached))
    yield FreeMemory(max(0.0, left), "limit of the control group")


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's groups and the enclosing ones; whether they have version 2."""
    for line in text_of(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version_2 = not controllers
        if version_2 or controller in controllers.split(","):
            top = root / "sys" / "fs" / "cgroup" / ("" if version_2 else controller)
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(top):
                    yield folder, version_2


def kilobytes(file: Path, name: str) -> float | None:
    """The bytes in a line such as ``MemAvailable:  21575696 kB``."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", text_of(file), re.MULTILINE)
    return 1024.0 * float(found[1]) if found else None


def number(variables: Mapping[str, str], name: str) -> int:
    """A whole number of the environment; 0 if there is none."""
    text = variables.get(name, "")
    return int(text) if text.isdigit() else 0


def text_of(file: Path) -> str:
    """The content of a file; empty if it does not exist or may not be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
