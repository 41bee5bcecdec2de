"""The example of a large batch runs, and learns."""

import re
from pathlib import Path

from runtime.processes.workers_under_test import run_script

from penstock.runtime.processes.launch import launch_workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "large_batch.py"


def test_the_example_trains_in_workers_that_torchrun_could_have_started() -> None:
    printed, _ = launch_workers(run_script, (str(EXAMPLE), []), workers=2, threads=1)
    match = re.fullmatch(r"step 30: loss (\d\.\d+) on 64 samples\nloss scale 65536\n", printed)
    assert match, printed
    assert float(match.group(1)) < 1.0
