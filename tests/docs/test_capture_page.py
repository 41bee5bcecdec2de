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


def test_the_tables_are_those_of_the_results(benchmark: Any, rows: list[dict[str, Any]]) -> None:
    shown = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    forward = script_at("benchmarks/stage_forward.py", "stage_forward_benchmark")
    stages = json.loads(forward.RESULTS.read_text(encoding="utf-8"))
    assert shown == [*benchmark.table(rows), *forward.table(stages)]


def test_a_stage_is_timed_beside_its_modules() -> None:
    forward = script_at("benchmarks/stage_forward.py", "stage_forward_benchmark")
    rows = forward.rows_of(forward.linear(), 3)
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    assert all(row["stage_us"] > row["plain_us"] > 0 for row in rows)


def test_a_small_model_is_captured(benchmark: Any) -> None:
    row = benchmark.row(benchmark.SMALL, 2)
    assert row["layers"] == 3
    assert len(row["seconds"]) == 2
    assert min(row["seconds"]) > 0
