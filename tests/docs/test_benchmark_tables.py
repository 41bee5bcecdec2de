"""What the recorded results of benchmarks must show."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import script_at

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def results(path: str) -> Any:
    return json.loads((BENCHMARKS / path).read_text(encoding="utf-8"))


def test_spectrain_converges_with_the_leads_of_its_paper_too() -> None:
    """`floor(k / 2) + N - k - 1` updates ahead in forwards, and `floor(k / 2)` in backwards."""
    found = 0
    for case in results("convergence/results.json")["cases"]:
        stages = int(case["case"].rpartition("/")[2])
        for row in case["rows"]:
            if row["method"] == "spectrain-published":
                assert row["leads"] == [
                    [k // 2 + stages - k - 1 for k in range(stages)],
                    [k // 2 for k in range(stages)],
                ]
                found += 1
    assert found == 9


def test_throughput_without_a_flush_is_still_what_was_written() -> None:
    script = script_at("benchmarks/convergence/throughput.py", "convergence_throughput")
    rows = results("convergence/throughput.json")["rows"]
    again = script.row_of(script.MODELS[0], rows[0]["link_gb_per_s"])
    seconds = {name: value for name, value in again.items() if name.endswith("_s")}
    assert seconds == pytest.approx({name: rows[0][name] for name in seconds}, rel=1e-12)


def test_rehearsals_did_as_planned() -> None:
    assert [one for one in results("rehearsal/results.json")["cases"] if one["differences"]] == []
    found = results("rehearsal/two_hosts.json")
    ours = found["losses"]["ours"]
    assert all(abs(loss / ours - 1) < 1e-6 for loss in found["losses"].values())
    assert found["differences"] == []


def test_predictions_of_long_actions_on_shared_cores_are_within_a_tenth() -> None:
    rows = [
        row
        for which in ("_first", "")
        for row in results(f"prediction/wide_4_workers{which}.json")["rows"]
    ]
    assert len(rows) == 22 and max(abs(row["error"]) for row in rows) < 0.1


def test_no_loss_differs_after_a_loss_of_a_rank() -> None:
    runs = results("reliability/elastic.json")["worker"]
    assert {run["largest_difference_of_losses"] for run in runs} == {0.0}


def test_results_are_whole() -> None:
    assert len(results("convergence/results.json")["cases"]) == 11
    assert len(results("prediction/forty_runs.json")["rows"]) == 40
    for name in ("schedules", "schedules_4_workers", "wide_4_workers"):
        assert len(results(f"prediction/{name}.json")["rows"]) == 11
