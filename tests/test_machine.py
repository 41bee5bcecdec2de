"""What a process may take, and still take, read from files as Linux writes them."""

from math import inf
from pathlib import Path

import pytest

from penstock import machine as subject
from penstock.machine import (
    FreeMemory,
    free_host_memory,
    processor_name,
    usable_cores,
    usable_memory_bytes,
)


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
    assert free_host_memory(root) == FreeMemory(8_192_000.0, "free memory of the host")


def test_a_processor_has_the_name_that_its_maker_gives_it(root: Path) -> None:
    assert processor_name(root)  # the architecture: there is no file
    write(root / "proc/cpuinfo", "processor : 0\nmodel name\t: Some   CPU @ 2 GHz\nflags : a\n")
    assert processor_name(root) == "Some CPU @ 2 GHz"


def test_where_the_system_says_nothing_there_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "PROCESS_LIMITS", ())
    assert free_host_memory(tmp_path).bytes == inf


def test_a_control_group_counts_without_the_files_that_it_caches(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/jobs/one\n")
    outer, inner = root / "sys/fs/cgroup/jobs", root / "sys/fs/cgroup/jobs/one"
    write(outer / "memory.max", "1000000\n")
    write(outer / "memory.current", "700000\n")
    write(outer / "memory.stat", "anon 1\nactive_file 40000\ninactive_file 2000\n")
    write(inner / "memory.max", "max\n")
    write(inner / "memory.current", "600000\n")
    assert free_host_memory(root) == FreeMemory(342_000.0, "limit of the control group")


def test_a_control_group_of_version_1(root: Path) -> None:
    write(root / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/hidden\n0::/\n")
    top = root / "sys/fs/cgroup/memory"
    write(top / "memory.limit_in_bytes", "500000\n")
    write(top / "memory.usage_in_bytes", "600000\n")
    write(top / "memory.stat", "active_file 7\ntotal_active_file 30000\n")
    assert free_host_memory(root) == FreeMemory(0.0, "limit of the control group")


def test_a_limit_on_the_data_of_the_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "PROCESS_LIMITS", (("RLIMIT_DATA", 2, "VmData"),))
    monkeypatch.setattr(subject.resource, "getrlimit", lambda _: (5_000_000, 5_000_000))
    write(root / "proc/self/status", "VmSize:  9000 kB\nVmData:\t    1000 kB\n")
    assert free_host_memory(root) == FreeMemory(3_976_000.0, "RLIMIT_DATA")


@pytest.fixture
def sixteen(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 9000 kB whose process is bound to 16 cores."""
    monkeypatch.setattr(subject.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return root


def test_a_machine_without_limits_is_used_whole(sixteen: Path) -> None:
    assert usable_cores(sixteen, {}) == 16
    assert usable_memory_bytes(sixteen, {}) == 9000 * 1024


@pytest.mark.parametrize(
    ("outer", "inner", "cores"),
    [
        ("max 100000", "400000 100000", 4),
        ("250000 100000", "400000 100000", 2),
        ("max 100000", "50000 100000", 1),
        ("max 100000", "max 100000", 16),
    ],
)
def test_a_quota_of_version_2_limits_the_cores(
    sixteen: Path, outer: str, inner: str, cores: int
) -> None:
    """As `docker run --cpus` or Slurm's cgroups write them."""
    write(sixteen / "proc/self/cgroup", "0::/jobs/one\n")
    write(sixteen / "sys/fs/cgroup/jobs/cpu.max", f"{outer}\n")
    write(sixteen / "sys/fs/cgroup/jobs/one/cpu.max", f"{inner}\n")
    assert usable_cores(sixteen, {}) == cores


def test_limits_of_version_1_in_a_container(sixteen: Path) -> None:
    """The container sees its own group as the whole tree, and the host's path of it."""
    write(sixteen / "proc/self/cgroup", "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n")
    write(sixteen / "sys/fs/cgroup/memory/memory.limit_in_bytes", "500000\n")
    write(sixteen / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000\n")
    write(sixteen / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cores(sixteen, {}) == 3
    assert usable_memory_bytes(sixteen, {}) == 500_000
    write(sixteen / "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(sixteen / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert usable_cores(sixteen, {}) == 16
    assert usable_memory_bytes(sixteen, {}) == 9000 * 1024


def test_a_memory_limit_of_version_2_is_that_of_the_tightest_group(sixteen: Path) -> None:
    write(sixteen / "proc/self/cgroup", "0::/jobs/one\n")
    write(sixteen / "sys/fs/cgroup/jobs/memory.max", "700000\n")
    write(sixteen / "sys/fs/cgroup/jobs/one/memory.max", "max\n")
    assert usable_memory_bytes(sixteen, {}) == 700_000


@pytest.mark.parametrize(
    ("variables", "cores", "memory"),
    [
        ({"SLURM_CPUS_ON_NODE": "4", "SLURM_MEM_PER_NODE": "5"}, 4, 5 << 20),
        ({"SLURM_CPUS_ON_NODE": "2", "SLURM_MEM_PER_CPU": "3"}, 2, 6 << 20),
        ({"SLURM_CPUS_ON_NODE": "64", "SLURM_MEM_PER_NODE": "0"}, 16, 9000 * 1024),
    ],
)
def test_what_slurm_grants(
    sixteen: Path, variables: dict[str, str], cores: int, memory: int
) -> None:
    assert (usable_cores(sixteen, variables), usable_memory_bytes(sixteen, variables)) == (
        cores,
        memory,
    )
