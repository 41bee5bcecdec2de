"""How many more bytes this process may allocate on its device, or on the host within its limits."""

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

__all__ = ["FreeMemory", "free_memory"]

PROCESS_LIMITS = (
    ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
)
CGROUP_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Files of limit and use, and the prefix of sums over descendants: cgroup version 2, version 1."""


@dataclass(frozen=True)
class FreeMemory:
    """The number of ``bytes`` that can be allocated, and the ``limit`` that allows no more."""

    bytes: float
    limit: str


def free_memory(device: torch.device, root: Path = Path("/")) -> FreeMemory:
    """The free memory under the tightest limit; ``root`` is the folder of ``proc`` and ``sys``.

    Infinite if the system reports no limit.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has reserved but does not use is free for this process.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return FreeMemory(float(free + kept), f"free memory of {device}")
    found = [FreeMemory(inf, ""), *within_host(root), *within_limits(root), *within_cgroups(root)]
    return min(found, key=lambda free: free.bytes)


def within_host(root: Path) -> Iterator[FreeMemory]:
    """The free memory of the host, including caches that it can drop."""
    available = kilobytes(root / "proc" / "meminfo", "MemAvailable")
    if available is not None:
        yield FreeMemory(available, "free memory of the host")


def within_limits(root: Path) -> Iterator[FreeMemory]:
    """What is left of the limits on this process (``ulimit``)."""
    for name, kind, counted in PROCESS_LIMITS:
        limit, _ = resource.getrlimit(kind)
        used = kilobytes(root / "proc" / "self" / "status", counted)
        if limit != resource.RLIM_INFINITY and used is not None:
            yield FreeMemory(max(0.0, limit - used), name)


def within_cgroups(root: Path) -> Iterator[FreeMemory]:
    """What is left of the limits on this process's control groups, including enclosing ones."""
    for line in text_of(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version_2 = not controllers
        if not version_2 and "memory" not in controllers.split(","):
            continue
        top = root / "sys" / "fs" / "cgroup" / ("" if version_2 else "memory")
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield from within_cgroup(folder, *CGROUP_FILES[0 if version_2 else 1])


def within_cgroup(
    folder: Path, limit_file: str, use_file: str, prefix: str
) -> Iterator[FreeMemory]:
    """What is left in one control group; its cached files count as free, as they can be dropped."""
    limit, used = text_of(folder / limit_file).strip(), text_of(folder / use_file).strip()
    if not limit.isdigit() or not used.isdigit():
        return
    cached = re.findall(
        rf"^{prefix}(?:in)?active_file (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE
    )
    left = float(limit) - float(used) + sum(map(float, cached))
    yield FreeMemory(max(0.0, left), "limit of the control group")


def kilobytes(file: Path, name: str) -> float | None:
    """The bytes in a line such as ``MemAvailable:  21575696 kB``."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", text_of(file), re.MULTILINE)
    return 1024.0 * float(found[1]) if found else None


def text_of(file: Path) -> str:
    """The content of a file; empty if it does not exist or may not be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
