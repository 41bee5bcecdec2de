"""Report seconds from the start of ``penstock train`` to its first step, by part.

    python benchmarks/runtime/first_step.py [--job gpt-text] [--workers 4] [--times 3] [--out F]

The command runs as a user runs it. Each line that it prints ends a part; the script stamps the
lines as they come, so it needs nothing from inside. The CPU seconds are of the command, the server
that forks the workers, and all workers, to the end of the run.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter, strftime
from typing import Any

PARTS = (
    ("import torch and start workers", "measuring the layers"),
    ("capture and measure", "measured "),
    ("plan", "plan: "),
    ("capture, build, first step and its check", "step 1"),
)
"""Each part, and the beginning of the line that ends it."""

STEPS = 3
"""Steps of a run; memory is measured in the third, or in the last one of fewer."""

ADOPT_ORPHANS = 36
"""Linux's PR_SET_CHILD_SUBREAPER, with which the server and its workers can be waited for."""


def one_run(job: str, workers: int) -> dict[str, float]:
    """The seconds of each part, their sum, and the CPU seconds of all processes up to the end."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "penstock"), "train", job]
        command += [
            "--workers",
            str(workers),
            "--steps",
            str(STEPS),
            "-o",
            str(Path(folder) / "run"),
        ]
        start = last = perf_counter()
        run = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        )
        assert run.stdout is not None
        lines: list[str] = []
        for line in run.stdout:
            now = perf_counter()
            lines.append(line)
            for part, beginning in PARTS:
                if part not in found and line.startswith(beginning):
                    found[part], last = now - last, now
                    break
        if run.wait():
            raise RuntimeError("the run failed: " + "".join(lines[-5:]))
    with suppress(ChildProcessError):
        while True:
            os.wait()
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["until the first step"] = last - start
    cpu_s = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    return found | {"CPU of the whole run": cpu_s}


def main() -> None:
    """Run the command some times, and print the median of each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", default="gpt-text")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    load = os.getloadavg()[0]
    runs = [one_run(arguments.job, arguments.workers) for _ in range(arguments.times)]
    found: dict[str, Any] = {
        "date": strftime("%Y-%m-%d %H:%M"),
        "load": load,
        "job": arguments.job,
        "workers": arguments.workers,
        "runs": runs,
        "median": {part: median(run[part] for run in runs if part in run) for part in runs[0]},
    }
    for part, seconds in found["median"].items():
        print(f"{seconds:7.1f} s  {part}")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
