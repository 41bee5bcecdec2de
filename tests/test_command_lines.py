"""Command lines of every kind, and all that once failed, end as they should."""

import subprocess
import sys

from scripts import ROOT


def test_every_kept_command_line_ends_well_and_leaves_nothing() -> None:
    script = ROOT / "benchmarks" / "reliability" / "commands.py"
    done = subprocess.run(
        [sys.executable, script, "--replay"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
