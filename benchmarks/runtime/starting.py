"""Starting the rank processes of the benchmark, and reading what they found."""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.runtime.processes.store import serve_store

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "rehearsal"))

from host_networks import PORT, joined_hosts  # noqa: E402

STORE_PORT = 29_500

Task = tuple[str, dict[str, Any]]
"""A kind of `ranks.KINDS` and its settings."""


def run_tasks(
    tasks: list[Task], ranks: int, limit_s: float, link_bytes_per_s: float = 0.0
) -> list[dict[str, Any]]:
    """Run ``tasks`` one after the other in ``ranks`` processes; their output goes to stderr.

    With ``link_bytes_per_s`` each rank has a host of its own, joined by ports of this rate.

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
            wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(line) for line in found.read_text().splitlines()]


def environment(rank: int, ranks: int, address: str, port: int) -> dict[str, str]:
    """What torchrun would set; one thread a process."""
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
