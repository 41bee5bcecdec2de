"""The page on the runtime says where its figures were measured."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "benchmarks" / "runtime.md").read_text(encoding="utf-8")


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / name / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runtime() -> dict[str, Any]:
    return results("runtime")


def test_each_part_says_its_machine_and_its_transport(runtime: dict[str, Any]) -> None:
    for title in ("Overhead of an action", "Both over Gloo", "Efficiency", "End to end"):
        section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
        assert "Gloo" in section, title
        assert "AMD EPYC" in section, title
    assert runtime["machine"]["processor"] == "AMD EPYC"
