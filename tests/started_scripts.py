"""Scripts that ranks run: under the real torchrun, or in worker processes."""

import os
import subprocess
import sys
from pathlib import Path

from runtime.processes.workers_under_test import run_script

from penstock.runtime.processes.launch import launch_workers

TORCHRUN = Path(sys.executable).with_name("torchrun")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def under_torchrun(script: Path, *arguments: object, ranks: int = 2) -> str:
    """What the script prints on all ranks."""
    command = [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", script, *arguments]
    done = subprocess.run(
        list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def by_workers(
    script: Path | str, *arguments: object, ranks: int = 2, folder: Path | str = "."
) -> tuple[str, ...]:
    """The same by ranks, in forks of a server that has imported torch: ready much sooner."""
    given = (str(script), list(map(str, arguments)), str(folder))
    return launch_workers(run_script, given, workers=ranks, threads=1)


def as_torchrun_would(command: str, folder: Path) -> str:
    """What rank 0 of ``torchrun --nproc-per-node RANKS SCRIPT ...`` prints, in such forks."""
    launcher, option, ranks, script, *arguments = command.split()
    assert (launcher, option) == ("torchrun", "--nproc-per-node")
    return by_workers(script, *arguments, ranks=int(ranks), folder=folder)[0]
