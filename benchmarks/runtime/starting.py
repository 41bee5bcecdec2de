"""Starting the rank processes of the benchmark, and reading what they found."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.runtime.processes.store import serve_store

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "rehearsal"))

from host_networks import PORT, joined_hosts  # noqa: E402

STORE_PORT = 29_500

Task = tuple[str, dict[str, Any]]
"""A kind of `ranks.KINDS` and its settings."""


QUOTA_PERIOD_US = 10_000
"""Period after which a slowed process gets its share of a core again."""


def run_tasks(
    tasks: list[Task],
    ranks: int,
    limit_s: float,
    link_bytes_per_s: float = 0.0,
    slow_rank: int | None = None,
) -> list[dict[str, Any]]:
    """Run ``tasks`` one after the other in ``ranks`` processes; their output goes to stderr.

    With ``link_bytes_per_s`` each rank has a host of its own, joined by ports of this rate.
    ``slow_rank`` gets half the share of a core that each of the others gets.

    Raises:
        RuntimeError: a process failed, or they took longer than ``limit_s``; all are ended.
    """
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        given, found = Path(directory) / "tasks.json", Path(directory) / "results.jsonl"
        given.write_text(json.dumps(tasks))
        command = [sys.executable, str(HERE / "ranks.py"), str(given), str(found)]
        if link_bytes_per_s:
            names = [f"host{rank}" for rank in range(ranks)]
            hosts = stack.enter_context(joined_hosts(names, [link_bytes_per_s] * ranks))
            commands = [[*host.command_prefix, *command] for host in hosts]
            variables = [
                environment(rank, ranks, hosts[0].address, STORE_PORT)
                | {
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "GROUP_RANK": str(rank),
                    "TORCHELASTIC_USE_AGENT_STORE": str(False),
                    "GLOO_SOCKET_IFNAME": PORT,
                }
                for rank in range(ranks)
            ]
        else:
            store = serve_store("127.0.0.1")
            commands = [command] * ranks
            variables = [environment(rank, ranks, "127.0.0.1", store.port) for rank in range(ranks)]
        processes = [
            subprocess.Popen(command, env=variable, stdout=sys.stderr)
            for command, variable in zip(commands, variables, strict=True)
        ]
        try:
            if slow_rank is not None:
                cores = min(1.0, (os.cpu_count() or 1) / ranks)
                stack.enter_context(core_quota(processes[slow_rank].pid, cores / 2))
            wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(line) for line in found.read_text().splitlines()]


@contextmanager
def core_quota(process: int, cores: float) -> Iterator[None]:
    """Limit a process in the block to a share of a core, by a control group; it must have ended.

    Raises:
        RuntimeError: this machine has no control groups of processors that may be changed.
    """
    quota_us, name = round(cores * QUOTA_PERIOD_US), f"penstock-{process}"
    root = Path("/sys/fs/cgroup")
    old = (root / "cpu").is_dir()
    group = (root / "cpu" if old else root) / name
    try:
        group.mkdir()
        if old:
            (group / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {QUOTA_PERIOD_US}")
        (group / "cgroup.procs").write_text(str(process))
    except OSError as cause:
        raise RuntimeError(f"a process cannot be slowed ({cause}); run as root on Linux") from cause
    try:
        yield
    finally:
        group.rmdir()


def environment(rank: int, ranks: int, address: str, port: int) -> dict[str, str]:
    """The variables that torchrun would set; one thread a process."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def wait(processes: list["subprocess.Popen[bytes]"], limit_s: float) -> None:
    """Return once all have ended well."""
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            raise RuntimeError("a rank of the benchmark failed; its message is above")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the benchmark took longer than {limit_s:g} s")
        time.sleep(0.05)
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank of the benchmark failed; its message is above")
