"""The page on capture shows what the benchmark has written, and the benchmark still runs."""

import json
from pathlib import Path
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


def test_a_small_model_is_captured(benchmark: Any) -> None:
    row = benchmark.row(benchmark.SMALL, 2)
    assert row["layers"] == 3
    assert len(row["seconds"]) == 2
    assert min(row["seconds"]) > 0
