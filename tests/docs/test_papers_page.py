"""The papers' figures: the page has those of the recorded results, and the command gives them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "benchmarks" / "papers" / "results.json"

NOT = "not reproduced"
Figures: TypeAlias = tuple[float | None, float, dict[str, float]]
"""Published, ours, and ours with other inputs."""


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


@pytest.mark.parametrize(
    ("figures", "verdict", "changed", "other"),
    [
        ((2.0, 2.09, {}), "reproduced", (2.0, 2.11, {}), NOT),
        ((2.0, 1.91, {}), "reproduced", (2.0, 1.89, {}), NOT),
        ((2.0, 9.0, {}), NOT, (9.0, 9.0, {}), "reproduced"),
        ((2.0, 3.0, {"a": 1.95, "b": 2.2}), "with a", (2.0, 3.0, {"a": 1.8, "b": 2.2}), NOT),
        # What lies between two of ours is not reproduced by that.
        ((2.0, 1.0, {"a": 3.0}), NOT, (2.0, 1.0, {"a": 2.09}), "with a"),
        ((None, 1.0, {}), "-", (1.0, 1.0, {}), "reproduced"),
    ],
)
def test_a_verdict_comes_out_the_other_way_if_a_figure_changes(
    papers, figures: Figures, verdict: str, changed: Figures, other: str
) -> None:
    from claim import verdict_of

    assert (verdict_of(*figures), verdict_of(*changed)) == (verdict, other)


def test_an_assumed_input_is_named_or_leaves_the_claim_undecided(papers) -> None:
    from claim import verdict_of

    assert verdict_of(2.0, 2.09, {}, assumed="64 rows") == "with 64 rows"
    assert verdict_of(2.0, 2.11, {}, assumed="64 rows") == "not decided"
    assert verdict_of(2.0, 2.11, {"32 rows": 2.0}, assumed="64 rows") == "with 32 rows"
    assert verdict_of(2.0, 2.0, {}, by_construction=True) == "by construction"


def test_every_verdict_of_the_page_is_that_of_its_figures(papers) -> None:
    from claim import Claim

    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["claims"]
    for row in recorded:
        given = {name: value for name, value in row.items() if name != "verdict"}
        assert Claim(**given).verdict == row["verdict"], row["what"]
    verdicts = {row["verdict"] for row in recorded}
    assert {"reproduced", "not reproduced", "not decided", "by construction", "-"} < verdicts


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
