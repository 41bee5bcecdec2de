"""The losses of the guide have the values and gradients of one process, on two ranks."""

import re
from pathlib import Path

from started_scripts import by_workers

SCRIPT = Path(__file__).parents[2] / "examples" / "losses.py"
NUMBER = r"-?\d+\.\d{4}"


def test_every_loss_of_the_guide_is_that_of_one_process() -> None:
    # The script ends in an error where a loss or a gradient differs from one process.
    printed, _ = by_workers(SCRIPT)
    lines = dict(line.split(": ", 1) for line in printed.splitlines())
    assert list(lines) == ["DPO", "PPO", "distillation", "router", "contrast", "spread"]
    for line in lines.values():
        assert re.fullmatch(rf"loss {NUMBER}(, \w+ {NUMBER})*", line), line
