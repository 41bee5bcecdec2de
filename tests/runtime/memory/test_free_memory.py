"""What a process may still take, read from files as Linux writes them."""

from math import inf
from pathlib import Path

import pytest
import torch

from penstock.runtime.memory import free_memory as subject
from penstock.runtime.memory.free_memory import FreeMemory, free_memory

CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 8000 kB free, for a process without limits of its own."""
    monkeypatch.setattr(subject, "PROCESS_LIMITS", ())
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_of_the_host_what_is_available(root: Path) -> None:
    assert free_memory(CPU, root) == FreeMemory(8_192_000.0, "free memory of the host")


def test_where_the_system_says_nothing_there_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "PROCESS_LIMITS", ())
    assert free_memory(CPU, tmp_path).bytes == inf


def test_a_control_group_counts_without_the_files_that_it_caches(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/jobs/one\n")
    outer, inner = root / "sys/fs/cgroup/jobs", root / "sys/fs/cgroup/jobs/one"
    write(outer / "memory.max", "1000000\n")
    write(outer / "memory.current", "700000\n")
    write(outer / "memory.stat", "anon 1\nactive_file 40000\ninactive_file 2000\n")
    write(inner / "memory.max", "max\n")
    write(inner / "memory.current", "600000\n")
    assert free_memory(CPU, root) == FreeMemory(342_000.0, "limit of the control group")


def test_a_control_group_of_version_1(root: Path) -> None:
    write(root / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/hidden\n0::/\n")
    top = root / "sys/fs/cgroup/memory"
    write(top / "memory.limit_in_bytes", "500000\n")
    write(top / "memory.usage_in_bytes", "600000\n")
    write(top / "memory.stat", "active_file 7\ntotal_active_file 30000\n")
    assert free_memory(CPU, root) == FreeMemory(0.0, "limit of the control group")


def test_a_limit_on_the_data_of_the_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "PROCESS_LIMITS", (("RLIMIT_DATA", 2, "VmData"),))
    monkeypatch.setattr(subject.resource, "getrlimit", lambda _: (5_000_000, 5_000_000))
    write(root / "proc/self/status", "VmSize:  9000 kB\nVmData:\t    1000 kB\n")
    assert free_memory(CPU, root) == FreeMemory(3_976_000.0, "RLIMIT_DATA")
