"""What a shell completes."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "expected"), [("penstock tra", "train"), ("penstock train --lr", "--lr-schedule")]
)
def test_a_shell_completes_commands_and_options(words: str, expected: str) -> None:
    line = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    asked = {**os.environ, **line, "_PENSTOCK_COMPLETE": "complete_bash"}
    program = [sys.executable, "-c", "from penstock.cli import main; main()"]
    done = subprocess.run(program, env=asked, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == ([expected], "")


def test_what_completion_installs_is_shown() -> None:
    program = [sys.executable, "-c", "from penstock.cli import main; main()", "--show-completion"]
    done = subprocess.run([*program, "bash"], capture_output=True, text=True)
    assert "_PENSTOCK_COMPLETE=complete_bash" in done.stdout + done.stderr
