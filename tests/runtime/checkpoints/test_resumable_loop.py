"""The example of a resumable loop ends, stopped and resumed, as it does in one go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runtime.processes.workers_under_test import run_script

from penstock.runtime.processes.launch import launch_workers

EXAMPLE = Path(__file__).parents[3] / "examples" / "resumable_loop.py"


def under_torchrun(epochs: int, checkpoints: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(EXAMPLE), str(epochs), str(checkpoints)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def by_workers(epochs: int, checkpoints: Path) -> list[str]:
    """The same in forks of a server that has imported torch, which are ready much sooner."""
    arguments = (str(EXAMPLE), [str(epochs), str(checkpoints)])
    return launch_workers(run_script, arguments, workers=2, threads=1)[0].splitlines()


@pytest.mark.timeout(600)
def test_the_example_resumes_within_an_epoch(tmp_path: Path) -> None:
    whole = under_torchrun(2, tmp_path / "whole")
    assert [line.partition(":")[0] for line in whole[:2]] == ["step 10", "step 20"]
    assert float(whole[1].rpartition(" ")[2]) > 0.8
    assert whole[2].startswith("predicted [")
    # The first run's last checkpoint is that of step 8, two steps before its end.
    first = by_workers(1, tmp_path / "parts")
    assert first[0] == whole[0]
    assert by_workers(2, tmp_path / "parts") == whole
