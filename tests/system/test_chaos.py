"""A short form of the campaign of faults, and of the soak: their flaws make the scripts fail."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script_at

RELIABILITY = Path(__file__).parents[2] / "benchmarks" / "reliability"

KINDS = ["kill run", "kill worker", "damage checkpoint", "terminate"]
# Networks of one's own need root's rights.
KINDS += ["cut link", "slow link"] if os.geteuid() == 0 else []


def run(script: str, *options: object) -> None:
    command = [sys.executable, str(RELIABILITY / script), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_run_ends_cleanly_and_resumes_bit_for_bit(kind: str) -> None:
    run("chaos.py", "--count", 2, "--seed", 1, "--only", kind)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_with_a_fault_a_minute_records_every_step_once(tmp_path: Path) -> None:
    run("soak.py", "--minutes", 5, "--out", tmp_path / "soak.json")


def samples(growth_per_hour: float) -> list[dict[str, Any]]:
    """Samples of two hours and two lives, in which a figure jumps to and fro and grows."""
    return [
        {
            "at_s": at_s,
            "life": at_s // 3600,
            "parent_handles": 20 + at_s % 3 + 50 * (at_s // 3600) + growth_per_hour * at_s / 3600,
        }
        for at_s in range(0, 7200, 10)
    ]


@pytest.mark.parametrize(("growth", "flat"), [(0.0, True), (3.0, True), (5.0, False)])
def test_growth_beyond_the_bound_is_found_within_the_lives_of_a_process(
    growth: float, flat: bool
) -> None:
    flatness = script_at("benchmarks/reliability/flatness.py", "reliability_flatness")
    trend = flatness.trend_of("parent_handles", samples(growth))
    assert trend.low <= growth <= trend.high
    assert trend.is_flat == flat
