"""Benchmarks run as documented, and their pages have the tables that they print."""

import json
import sys

import pytest
from docs.test_pages import ROOT, succeed
from scripts import script_at


def output_of(*command: str) -> str:
    return succeed([sys.executable, *command], ROOT)


def test_the_benchmark_prints_one_json_object_with_the_part_that_was_asked_for() -> None:
    values = json.loads(output_of("benchmarks/simulator.py", "--only", "playing", "--json"))
    assert len(values["playing"]) == 6
    assert all(row["engine_actions_per_s"] > 0 for row in values["playing"])
    assert "scoring" not in values


def test_the_runtime_benchmark_prints_both_ratios_and_nothing_else() -> None:
    values = json.loads(output_of("benchmarks/runtime.py", "--smallest", "--json"))
    assert values.keys() == {"overhead_ratio", "limit_ratio"}
    # The rival has no schedule like the second one.
    assert values["overhead_ratio"].keys() == {"1f1b/2"}
    assert values["limit_ratio"].keys() == {"1f1b/2", "zb-h1/2"}
    assert all(isinstance(ratio, float) for ratio in values["limit_ratio"].values())


def rows_of(text: str, beginning: str = "|") -> set[str]:
    return {line for line in text.splitlines() if line.startswith(beginning)}


def page(name: str) -> str:
    return (ROOT / "docs" / "benchmarks" / f"{name}.md").read_text(encoding="utf-8")


def test_the_papers_figures_come_out_again() -> None:
    rows = rows_of(output_of("benchmarks/papers.py", "--quick"))
    tables = (ROOT / "benchmarks" / "papers" / "tables.md").read_text(encoding="utf-8")
    assert len(rows) > 40 and rows <= rows_of(tables)


def test_the_page_counts_the_papers_figures_that_come_out() -> None:
    papers = script_at("benchmarks/papers.py", "papers_benchmark")
    claims = json.loads(papers.RESULTS.read_text(encoding="utf-8"))["claims"]
    rows = rows_of(papers.counts_table(claims))
    assert len(rows) == 6 and rows <= rows_of(page("papers"))


def test_predictions_of_the_largest_runs_come_out_again() -> None:
    printed = rows_of(output_of("benchmarks/largest.py", "--quick"), "| sc21 |")
    text = (ROOT / "benchmarks" / "largest" / "results.json").read_text(encoding="utf-8")
    recorded = {f"{run['predicted_s']:.2f} s" for run in json.loads(text)["runs"]}
    assert len(printed) == 2
    assert {row.split(" | ")[5] for row in printed} <= recorded


def test_predictions_of_fsdp_runs_come_out_again() -> None:
    rows = rows_of(output_of("benchmarks/fsdp.py"))
    assert len(rows) > 10 and rows <= rows_of(page("predictions"))


@pytest.mark.parametrize("index", [0, 13, 14])
def test_an_estimate_of_hardware_comes_out_again(index: int) -> None:
    hardware = script_at("benchmarks/hardware.py", "hardware_benchmark")
    row = json.loads(hardware.RESULTS.read_text(encoding="utf-8"))["rows"][index]
    estimated = hardware.estimated_tokens_per_s(hardware.RUNS[index])
    assert estimated == pytest.approx(row["estimated_tokens_per_s"], rel=1e-6)
