"""Numba starts without scipy.linalg, and both still work."""

import subprocess
import sys

PROGRAM = """
import sys
from penstock.command_line.numba_start import start_numba_without_scipy

start_numba_without_scipy()
import numba
import numpy as np

total = numba.njit(lambda values: values.sum())(np.arange(4.0))
assert total == 6.0, total
assert "scipy.linalg" not in sys.modules
start_numba_without_scipy()
from scipy.linalg import norm

assert norm([3.0, 4.0]) == 5.0
"""


def test_compiled_code_runs_and_scipy_is_there_when_asked_for() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
