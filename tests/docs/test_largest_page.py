"""The largest runs: the page has the recorded results, and the command gives them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "benchmarks" / "largest" / "results.json"


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script_at("benchmarks/largest.py", "benchmark_of_the_largest")


def test_the_page_has_the_recorded_tables(largest) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    page = largest.PAGE.read_text(encoding="utf-8")
    tables = largest.tables(recorded)
    assert list(tables) == ["Predicted and published", "Planning"]
    for heading, table in tables.items():
        assert largest.with_table(page, heading, table) == page, heading
    assert largest.counts(recorded["runs"]) in page
    assert largest.sources() in page
    within = [run for run in recorded["runs"] if abs(largest.error_of(run)) <= largest.WITHIN]
    assert sum(run["gpus"] >= 1024 for run in within) >= 6


def test_the_command_gives_the_recorded_predictions_on_a_clean_clone() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/largest.py", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| sc21 |")]
    page = (ROOT / "docs" / "benchmarks" / "largest.md").read_text(encoding="utf-8")
    assert len(rows) == 2
    assert set(rows) <= set(page.splitlines())
