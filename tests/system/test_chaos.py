"""A short form of the campaign of faults: its flaws make the script fail."""

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "reliability" / "chaos.py"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["kill run", "kill worker", "damage checkpoint", "terminate"])
def test_a_broken_run_ends_cleanly_and_resumes_bit_for_bit(kind: str) -> None:
    command = [sys.executable, str(CHAOS), "--count", "2", "--seed", "1", "--only", kind]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
