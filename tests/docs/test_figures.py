"""Figures of pages against result files: none differs today, and a changed digit is found."""

import json
import re
import sys
from random import Random
from typing import Any

import pytest
from scripts import script_at

PAGES = (
    "README.md",
    "docs/start-here.md",
    "docs/benchmarks/convergence.md",
    "docs/benchmarks/gpu.md",
    "docs/benchmarks/runtime.md",
    "docs/benchmarks/schedules.md",
    "docs/benchmarks/planning.md",
    "docs/benchmarks/reliability.md",
    "docs/benchmarks/rehearsal.md",
    "docs/how-it-works/memory.md",
    "benchmarks/prediction/README.md",
)


@pytest.fixture(scope="module")
def figures() -> Any:
    before = set(sys.path)
    yield script_at("benchmarks/figures.py", "figures_of_pages")
    sys.path[:] = [path for path in sys.path if path in before]


def test_no_figure_of_any_page_differs_from_its_file(figures: Any) -> None:
    found = {page: figures.checked(page, figures.read(page)) for page in figures.PAGES}
    assert [words for each in found.values() for words in each.differs] == []
    assert sum(len(each.figures) for each in found.values()) > 5000


def test_every_figure_of_the_first_page_has_a_source(figures: Any) -> None:
    text = figures.read("README.md")
    found = figures.checked("README.md", text)
    assert [text[start - 40 : end + 5] for start, end in found.open] == []
    assert len(found.figures) >= 25


@pytest.mark.parametrize("page", PAGES)
def test_a_changed_digit_is_found(figures: Any, page: str) -> None:
    """Of some figures, drawn by the page's name."""
    text = figures.read(page)
    spans = figures.checked(page, text).figures
    draw = Random(page)
    for start, end in draw.sample(spans, min(25, len(spans))):
        digits = [place for place in range(start, end) if text[place].isdigit()]
        place = draw.choice(digits)
        other = str((int(text[place]) + draw.randint(1, 9)) % 10)
        changed = text[:place] + other + text[place + 1 :]
        assert figures.checked(page, changed).differs, text[start - 60 : end]


def test_pages_say_what_is_older_than_its_code(figures: Any) -> None:
    """`python benchmarks/figures.py --write` says it."""
    if not script_at("benchmarks/figures/ages.py", "ages_of_results").has_history():
        pytest.skip("a shallow clone does not know when results were made")
    stale = [p for p in figures.PAGES if figures.aged(p, figures.read(p)) != figures.read(p)]
    assert stale == []


def test_a_figure_without_a_source_is_counted_and_a_stated_one_by_its_reason(figures: Any) -> None:
    text = "It takes 1.5 s.\n\nAt most 3 %. <!-- stated: setting -->\n"
    found = figures.checked("docs/index.md", text)
    assert len(found.open) == 1 and found.stated == {"setting": 1}
    (unknown,) = figures.checked("docs/index.md", "3 % <!-- stated: we know -->").differs
    assert "we know is no reason" in unknown


def test_a_wrong_figure_a_missing_key_and_an_unknown_file_are_told(figures: Any) -> None:
    def told(comment: str, shown: str = "1.11") -> str:
        text = f"# Title\n\nIt is {shown} of it. <!-- figures: {comment} -->\n"
        return " ".join(figures.checked("docs/index.md", text).differs)

    path, place = "runtime/results.json", 'document["end-to-end"][0].equal_memory.median'
    cases = json.loads((figures.ROOT / "benchmarks" / path).read_text(encoding="utf-8"))
    value = cases["end-to-end"][0]["equal_memory"]["median"]
    assert told(f"{path}: {place}", f"{value:.2f}") == ""
    assert told(f"{path}: {place} + 0.01", f"{value + 0.01:.2f}") == ""
    assert f"is {value:.6g}, and the page has 9.99" in told(f"{path}: {place}", "9.99")
    assert "line 3: document[0]" in told(f"{path}: document[0]")
    assert "KeyError 'slower'" in told(f"{path}: slower")
    assert "No such file" in told("runtime/gone.json: 1.11")


def test_every_test_of_a_promise_exists_and_passed() -> None:
    promises = script_at("benchmarks/promises.py", "promises_of_readme")
    recorded = json.loads(promises.RESULTS.read_text(encoding="utf-8"))
    assert recorded["passed"].keys() == promises.PROMISES.keys()
    assert all(passed and not failed for passed, failed in recorded["passed"].values())
    for tests in promises.PROMISES.values():
        path, _, name = tests.partition("::")
        source = (promises.ROOT / path).read_text(encoding="utf-8")
        assert f"def {name or 'test_'}" in source, tests


def test_expressions_are_paths_comparisons_and_a_few_functions() -> None:
    value_of = script_at("benchmarks/figures/expressions.py", "figures_expressions").value_of
    rows = [
        {"a": 1, "of": [{"b": 2}]},
        {"a": -3, "of": [{"b": 5}, {"b": None}]},
        {"a": 4, "of": []},
    ]
    document = {"rows": rows, "odd name": {"x": [7, 8]}}
    for expression, value in {
        'document["odd name"].x[-1]': 8,
        "max(abs(rows.a)) / 2": 2,
        "median(rows.a)": 1,
        "count(rows[a >= 1])": 2,
        "rows[a == -3].of.b * 100": 500,
        "min(rows[a < 2].of.b + rows[a < 2].a)": 2,
    }.items():
        assert value_of(expression, document) == value, expression
    for refused in ("rows.a", "__import__('os')", "rows.c", "max(rows", "rows[0].a.real"):
        with pytest.raises(ValueError, match=re.escape(refused)):
            value_of(refused, document)
