"""The example of a large batch runs under plain torchrun, and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "large_batch.py"


def test_the_example_trains_under_torchrun() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    match = re.fullmatch(
        r"step 30: loss (\d\.\d+) on 64 samples\nloss scale 65536; noise scale (.+) samples\n",
        result.stdout,
    )
    assert match, result.stdout
    assert float(match.group(1)) < 1.0
    assert float(match.group(2)) > 0
