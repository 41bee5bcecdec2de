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
    headings = ["By source", "Predicted and published", "Which layout is chosen", "Planning"]
    assert sorted(tables) == sorted(headings)
    for heading, table in tables.items():
        assert largest.with_table(page, heading, table) == page, heading
    assert largest.counts(recorded["runs"]) in page
    assert largest.layout_counts(recorded["runs"]) in page
    assert largest.sources() in page


def test_every_recorded_run_comes_out_again(largest) -> None:
    """All rows, those of long tables too, which the page does not list."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
    again = largest.run_results(quick=False)
    assert len(again) == len(recorded)
    for run, found in zip(recorded, again, strict=True):
        times = {name: value for name, value in run.items() if isinstance(value, float)}
        assert found == run | {name: pytest.approx(value) for name, value in times.items()}


def test_a_changed_row_changes_what_the_page_says(largest) -> None:
    """Each run that is counted as near is made twice as long, and is missed by the count."""
    runs = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
    page = largest.PAGE.read_text(encoding="utf-8")
    near = [run for run in runs if run["judges"] and run["published_s"] and largest.is_within(run)]
    assert f"{len(near)} of " in largest.counts(runs)
    for run in near:
        longer = run | {"predicted_s": 2 * run["predicted_s"]}
        changed = [longer if other is run else other for other in runs]
        assert largest.counts(changed) not in page, f"{run['source']}, {run['plan']}"


def test_what_sets_a_share_judges_nothing_and_most_others_are_near(largest) -> None:
    runs = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
    assert {run["source"] for run in runs if run["sets"]} == {"nemo", "nemotron-15b"}
    assert not any(run["judges"] for run in runs if run["sets"])
    judging = [run for run in runs if run["judges"] and run["published_s"]]
    assert sum(map(largest.is_within, judging)) >= 0.75 * len(judging) > 100
    assert max(map(largest.regret, largest.layout_groups(runs).values())) < 0.15


def test_ranks_and_regret(largest) -> None:
    # Published 1 to 4 s; the second is predicted to be fastest, and the last two are exchanged.
    times = ((1.0, 2.0), (2.0, 1.0), (3.0, 4.0), (4.0, 3.0))
    layouts = [{"published_s": published, "predicted_s": time} for published, time in times]
    assert largest.rank_correlation(layouts) == pytest.approx(0.6)
    assert largest.regret(layouts) == pytest.approx(1.0)


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
