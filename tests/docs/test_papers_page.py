"""The papers' figures: the page has those of the recorded results, and the command gives them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "benchmarks" / "papers" / "results.json"


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script_at("benchmarks/papers.py", "benchmark_of_papers")


def test_the_page_has_the_recorded_tables(papers) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    page = papers.PAGE.read_text(encoding="utf-8")
    tables = papers.tables(recorded)
    assert {"DAPPLE", "SPP", "BaPipe", "SpecTrain", "The plans of table V"} == set(tables)
    for heading, table in tables.items():
        assert papers.with_table(page, heading, table) == page, heading
    rehearsals = recorded["rehearsals"]
    assert f"a load of {rehearsals['load']:.1f} from other work ({rehearsals['date']})" in page


def test_the_command_gives_the_recorded_claims_on_a_clean_clone() -> None:
    """They are the same to the last digit."""
    done = subprocess.run(
        [sys.executable, "benchmarks/papers.py", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = {cells(line) for line in done.stdout.splitlines() if line.startswith("| ")}
    page = (ROOT / "docs" / "benchmarks" / "papers.md").read_text(encoding="utf-8")
    recorded = {cells(line) for line in page.splitlines() if line.startswith("| ")}
    assert len(printed) > 40
    assert printed <= recorded


def cells(line: str) -> tuple[str, ...]:
    """What a row says, but for what was rehearsed."""
    found = [cell.strip() for cell in line.strip("|").split("|")]
    return (*found[:-2], found[-1])
