"""The example of a user's own loop trains."""

import re
from pathlib import Path

from started_scripts import by_workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_the_example_trains() -> None:
    printed, _ = by_workers(EXAMPLE)
    match = re.fullmatch(r"step 30: loss (\d\.\d+)\n", printed)
    assert match, printed
    assert float(match.group(1)) < 0.5
