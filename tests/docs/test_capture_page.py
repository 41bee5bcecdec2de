"""The page on capture shows what the benchmark has written, and the benchmark still runs."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "capture.md"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script_at("benchmarks/capture.py", "capture_benchmark")


@pytest.fixture(scope="module")
def rows(benchmark: Any) -> list[dict[str, Any]]:
    return json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))["rows"]


def test_the_table_is_that_of_the_results(benchmark: Any, rows: list[dict[str, Any]]) -> None:
    shown = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert shown == benchmark.table(rows)


def test_twelve_layers_take_less_than_two_seconds(rows: list[dict[str, Any]]) -> None:
    found = {row["model"]: median(row["twice_s"]) for row in rows if row["layers"] == 12}
    assert len(found) == 3
    assert max(found.values()) < 2


def test_a_model_is_captured_both_ways(benchmark: Any) -> None:
    row = benchmark.row(benchmark.SMALL, 1)
    assert (row["layers"], row["distinct"]) == (3, 1)
    assert len(row["twice_s"]) == len(row["all_s"]) == 1
    assert min(*row["twice_s"], *row["all_s"]) > 0
