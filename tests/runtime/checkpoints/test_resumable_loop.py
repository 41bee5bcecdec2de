"""The example of a resumable loop ends, stopped and resumed, as it does in one go."""

from pathlib import Path

import pytest
from started_scripts import by_workers

EXAMPLE = Path(__file__).parents[3] / "examples" / "resumable_loop.py"


@pytest.mark.timeout(600)
def test_the_example_resumes_within_an_epoch(tmp_path: Path) -> None:
    whole = by_workers(EXAMPLE, 2, tmp_path / "whole")[0].splitlines()
    assert [line.partition(":")[0] for line in whole[:2]] == ["step 10", "step 20"]
    assert float(whole[1].rpartition(" ")[2]) > 0.8
    assert whole[2].startswith("predicted [")
    # The first run's last checkpoint is that of step 8, two steps before its end.
    first, _ = by_workers(EXAMPLE, 1, tmp_path / "parts")
    assert first.splitlines()[0] == whole[0]
    assert by_workers(EXAMPLE, 2, tmp_path / "parts")[0].splitlines() == whole
