"""The benchmarks of capture still run."""

from typing import Any

import pytest
from scripts import script_at


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script_at("benchmarks/capture.py", "capture_benchmark")


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
