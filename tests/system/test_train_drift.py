"""`penstock train` names a rank that becomes slow."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import train

pytestmark = pytest.mark.timeout(280)


def test_a_rank_that_sleeps_in_its_layers_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = '["training_jobs:slow_down_rank_one"]'
    result = train(tmp_path, shown=True, steps=16, verify='"off"', callbacks=slow)
    said = capfd.readouterr().err.splitlines()
    first, *_ = result.drift
    assert first.startswith("stage 1 on rank 1 is a straggler: "), result.drift
    again = f"--resume --out {tmp_path / 'run'} --plan PLAN"
    assert [line for line in said if "straggler" in line] == [
        f"{first}; measure and plan again, and continue with {again}"
    ]
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["drift"] == list(result.drift)
    assert "stage 1 on rank 1 is a straggler" in result.report.read_text()
    board = b"".join(p.read_bytes() for p in (tmp_path / "run" / "tensorboard").iterdir())
    assert b"drift/stage_1_rank_1" in board and b"drift/all_ranks" in board
