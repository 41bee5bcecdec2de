"""Benchmarks of simulator and runtime, and tables of published figures, run as documented."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def output_of(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
