"""Examples in docstrings are blocks of code on the page of the Python reference."""

import inspect
import re
from typing import Any

import pytest
from docs.test_pages import DOCS, ROOT
from scripts import script_at

import penstock

WITH_EXAMPLES = [
    name for name in penstock.__all__ if ">>> " in (getattr(penstock, name).__doc__ or "")
]


def extension() -> Any:
    """The extension of mkdocstrings; it is no part of the package."""
    return script_at("docs/reference/doctest_blocks.py", "doctest_blocks")


def test_examples_are_no_quotations() -> None:
    markdown = pytest.importorskip("markdown")
    pytest.importorskip("griffe")
    blocks = extension()
    assert len(WITH_EXAMPLES) >= 3
    for name in WITH_EXAMPLES:
        text = inspect.getdoc(getattr(penstock, name)) or ""
        html = markdown.markdown(blocks.with_blocks(text), extensions=["fenced_code"])
        assert "<blockquote>" not in html, name
        assert html.count("<pre>") == html.count("</pre>") >= 1, name
        # Before, they were.
        assert "<blockquote>" in markdown.markdown(text), name


def test_parameters_have_a_table_of_types_and_defaults() -> None:
    griffe = pytest.importorskip("griffe")
    package = griffe.load("penstock.report.gantt_text", search_paths=[str(ROOT / "src")])
    table = extension().parameter_table(package["gantt"])
    assert "| `timeline` | <code>Timeline</code> | needed |" in table
    assert "| `colour` | <code>bool</code> | <code>True</code> |" in table
    assert extension().parameter_table(package["letter"]) == ""


def test_every_public_name_is_stable_or_may_change() -> None:
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:stable|may change) \|(.*)\|$", page, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == penstock.__all__


def test_the_site_uses_the_extension() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "extensions: [docs/reference/doctest_blocks.py]" in site
