"""Starting the rank processes of the benchmark, and reading what they found."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.runtime.processes.store import serve_store

__all__ = ["run_tasks"]

HERE = Path(__file__).parent


Task = tuple[str, dict[str, Any]]
"""A kind of `ranks.KINDS` and its settings."""


def run_tasks(tasks: list[Task], ranks: int, limit_s: float) -> list[dict[str, Any]]:
    """Run ``tasks`` one after the other in ``ranks`` processes; their output goes to stderr.

    Raises:
        RuntimeError: a process failed, or they took longer than ``limit_s``; all are ended.
    """
    with tempfile.TemporaryDirectory() as directory:
        given, found = Path(directory) / "tasks.json", Path(directory) / "results.jsonl"
        given.write_text(json.dumps(tasks))
        store = serve_store("127.0.0.1")
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "ranks.py"), str(given), str(found)],
                env=environment(rank, ranks, store.port),
                stdout=sys.stderr,
            )
            for rank in range(ranks)
        ]
        try:
            wait(processes, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(line) for line in found.read_text().splitlines()]


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set; one thread a process."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
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
