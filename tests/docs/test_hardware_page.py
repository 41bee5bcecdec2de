"""The page of estimates against published runs shows what the benchmark has written and finds."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "hardware.md"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script_at("benchmarks/hardware.py", "hardware_benchmark")


@pytest.fixture(scope="module")
def rows(benchmark: Any) -> list[dict[str, Any]]:
    return json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))["rows"]


def test_the_table_is_that_of_the_results(benchmark: Any, rows: list[dict[str, Any]]) -> None:
    shown = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert shown == benchmark.table(rows)


def test_the_page_counts_as_the_results_do(rows: list[dict[str, Any]]) -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    held_out = [
        abs(row["error"])
        for row in rows
        if not (row["model"] == "MPT-1b" and row["tokens"] == 2048)
    ]
    within = [sum(error <= limit for error in held_out) for limit in (0.2, 0.1)]
    assert f"Of the other {len(held_out)}, {within[0]} are within 20 %" in text
    assert f"and {within[1]} within 10 %" in text


@pytest.mark.parametrize("index", [0, 13, 14])
def test_an_estimate_is_still_what_was_written(
    benchmark: Any, rows: list[dict[str, Any]], index: int
) -> None:
    estimated = benchmark.estimated_tokens_per_s(benchmark.RUNS[index])
    assert estimated == pytest.approx(rows[index]["estimated_tokens_per_s"], rel=1e-6)
