"""The example of a user's own loop runs under plain torchrun, with nothing else prepared."""

import re
from pathlib import Path

from started_scripts import under_torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_the_example_trains_under_torchrun() -> None:
    printed = under_torchrun(EXAMPLE)
    match = re.fullmatch(r"step 30: loss (\d\.\d+)\n", printed)
    assert match, printed
    assert float(match.group(1)) < 0.5
