"""The page of the census shows what the benchmark has recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import script_at

ROOT = Path(__file__).parent.parent.parent
CENSUS = ROOT / "benchmarks" / "models"


@pytest.fixture(scope="module")
def page() -> Any:
    return script_at("benchmarks/models/page.py", "census_page")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return json.loads((CENSUS / "results.json").read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_results(page: Any, document: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "benchmarks" / "models.md").read_text(encoding="utf-8")
    assert page.filled_in(text, document) == text
    for name, lines in page.parts(document).items():
        assert "\n".join(lines) in text, name


def test_every_row_says_when_and_with_what_it_was_judged(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        assert row["date"] and row["commit"], row["name"]
