"""How long a run stands still when it loses a worker; docs/benchmarks/reliability.md has figures.

    python benchmarks/reliability/lost_worker.py [--runs 5] [--workers 4] --out lost_worker.json

Each run trains the built-in job `gpt-text` with ``--may-lose 1``. A worker drawn by the run's
number is killed after step 105; checkpoints are written every 10 steps. The seconds count from the
kill to the record of the first step that the others take. The losses of all steps are compared
with those of a run on as many workers that lost none.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

JOB = 'base = "gpt-text"\nsteps = 160\ncheckpoint_every = 10\nevaluate_every = 0\nverify = "off"\n'
PENSTOCK = "from penstock.cli import main; main()"
KILL_AFTER = 105
LIMIT_S = 600.0


def started(job: Path, out: Path, workers: int) -> "subprocess.Popen[str]":
    """A run that may lose a worker; its messages go to a file beside the run directory."""
    with out.with_suffix(".log").open("w") as log:
        command = ("train", job, "--workers", workers, "--may-lose", 1, "-o", out)
        return subprocess.Popen(
            [sys.executable, "-c", PENSTOCK, *map(str, command)],
            stdout=subprocess.DEVNULL,
            stderr=log,
            text=True,
        )


def losses(out: Path) -> dict[int, float]:
    """The loss of each step that is recorded so far."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["loss"] for row in rows}


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> float:
    """The time when a condition first holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run ended, or did not get there in time")
        time.sleep(0.01)
    return time.monotonic()


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    """The process numbers of a run's workers, oldest first."""
    server = children(process.pid)
    return sorted(child for parent in server for child in children(parent))


def children(parent: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(number) for task in tasks for number in task.read_text().split()]


def lose_a_worker(job: Path, out: Path, workers: int, number: int) -> dict[str, float]:
    """Kill a worker of a run; the seconds until the next step, by what happens in them."""
    process = started(job, out, workers)
    wait_until(lambda: max(losses(out), default=0) >= KILL_AFTER, process)
    victim = random.Random(number).choice(workers_of(process))
    log = out.with_suffix(".log")
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    noticed = wait_until(lambda: "goes on with" in log.read_text(), process)
    planned = wait_until(lambda: log.read_text().count("starting ") == 2, process)
    # Rank 0 drops the rows after the checkpoint, and then adds the first one of its own.
    wait_until(lambda: max(losses(out), default=0) < KILL_AFTER, process)
    before = max(losses(out), default=0)
    stepped = wait_until(lambda: max(losses(out), default=0) > before, process)
    if process.wait(LIMIT_S):
        raise SystemExit(f"the run failed: {log.read_text()}")
    return {
        "noticed_s": round(noticed - killed, 2),
        "planned_s": round(planned - noticed, 2),
        "stepped_s": round(stepped - planned, 2),
        "all_s": round(stepped - killed, 2),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        job.write_text(JOB)
        whole = Path(folder) / "whole"
        started(job, whole, arguments.workers).wait(LIMIT_S)
        for number in range(arguments.runs):
            out = Path(folder) / f"run-{number}"
            row = lose_a_worker(job, out, arguments.workers, number)
            apart = [abs(losses(out)[step] / loss - 1) for step, loss in losses(whole).items()]
            rows.append({**row, "largest_difference_of_losses": max(apart)})
            print(rows[-1], flush=True)
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "load": round(os.getloadavg()[0], 1),
    }
    found = {"machine": machine, "workers": arguments.workers, "runs": rows}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
