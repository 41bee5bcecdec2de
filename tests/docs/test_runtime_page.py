"""The page on the runtime shows the tables and figures of the benchmarks' results."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "benchmarks" / "runtime.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / name / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def runtime() -> dict[str, Any]:
    return results("runtime")


def test_the_tables_are_those_of_the_results(runtime: dict[str, Any]) -> None:
    tables = script_at("benchmarks/runtime/tables.py", "runtime_tables").page_tables(runtime)
    assert tables.keys() >= {"overhead", "gloo", "efficiency", "end-to-end", "memory"}
    for part, table in tables.items():
        assert "\n".join(table) in PAGE, part


def test_the_sentences_have_the_figures_of_the_results(runtime: dict[str, Any]) -> None:
    together = runtime["end-to-end"][0]
    low, high = (f"{together[key]:.2f}" for key in ("least", "most"))
    assert f"The median is **{together['faster']:.2f}** ({low} to {high};" in TEXT
    (replicas,) = runtime["data-parallel"]
    assert f"{replicas['iteration_ratio']:.3f} of its iteration" in TEXT
    for row in runtime["options"]:
        assert f" | {row['ratio']:.3f} |" in PAGE, row["option"]


def test_each_part_says_its_machine_and_its_transport(runtime: dict[str, Any]) -> None:
    for title in ("Overhead of an action", "Both over Gloo", "Efficiency", "End to end"):
        section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
        assert "Gloo" in section, title
        assert "AMD EPYC" in section, title
    assert runtime["machine"]["processor"] == "AMD EPYC"


def test_the_table_of_verification_is_that_of_the_results() -> None:
    verify = script_at("benchmarks/verify.py", "verify_benchmark")
    document = results("verify")
    assert "\n".join(verify.table(document["cases"])) in PAGE
    assert document["machine"]["processor"].partition("(")[0] in PAGE
