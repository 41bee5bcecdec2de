"""The papers, statement by statement: a verdict each, and what it rests on exists."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "benchmarks" / "papers-statements.md").read_text(encoding="utf-8")
VERDICTS = ("works", "differs", "missing")
STATEMENTS = {"DAPPLE": ("D", 31), "SpecTrain": ("T", 16), "SPP": ("P", 14), "BaPipe": ("B", 24)}
SECTION = re.compile(r"^## (\w+)$\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
SCRIPT = re.compile(r"`(benchmarks/[\w/]+\.py)`")
LINK = re.compile(r"\]\(([\w./-]+\.md#[\w-]+)\)")


class Statement(NamedTuple):
    """A row of a table of the page."""

    number: str
    says: str
    verdict: str
    here: str
    shown: str


def statements(text: str) -> list[Statement]:
    """The rows that begin with a letter and a number."""
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|"))
    return [Statement(*row) for row in rows if re.fullmatch(r"[A-Z]\d+", row[0])]


OF_PAPER = {paper: statements(text) for paper, text in SECTION.findall(PAGE)}
EVERY = [row for rows in OF_PAPER.values() for row in rows]


@cache
def functions_of(path: str) -> set[str]:
    """The functions at the top of a file of the repository; none if it does not exist."""
    file = ROOT / path
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def lost(row: Statement) -> list[str]:
    """The tests and scripts of a row that do not exist."""
    tests = [
        f"{path}::{name}"
        for path, name in TEST.findall(row.shown)
        if name not in functions_of(path)
    ]
    return tests + [path for path in SCRIPT.findall(row.shown) if not (ROOT / path).is_file()]


def test_every_statement_has_its_number_and_one_of_three_verdicts() -> None:
    assert {paper: [row.number for row in rows] for paper, rows in OF_PAPER.items()} == {
        paper: [f"{letter}{i + 1}" for i in range(count)]
        for paper, (letter, count) in STATEMENTS.items()
    }
    assert [row for row in EVERY if row.verdict not in VERDICTS] == []


def test_every_test_and_script_that_is_named_exists() -> None:
    assert {row.number: lost(row) for row in EVERY if lost(row)} == {}


def test_what_works_is_shown_by_a_test_or_a_script() -> None:
    works = [row for row in EVERY if row.verdict == "works"]
    assert [
        row for row in works if not TEST.search(row.shown) and not SCRIPT.search(row.shown)
    ] == []


def test_what_differs_or_is_missing_is_said_in_a_section() -> None:
    """That the section exists is tested with all links of the docs."""
    rest = [row for row in EVERY if row.verdict != "works"]
    assert [row for row in rest if not LINK.search(row.here)] == []


def test_counts_are_those_of_the_tables() -> None:
    counted = {paper: Counter(row.verdict for row in rows) for paper, rows in OF_PAPER.items()}
    counted[f"all {len(EVERY)}"] = Counter(row.verdict for row in EVERY)
    for paper, found in counted.items():
        cells = " | ".join(str(found[verdict]) for verdict in VERDICTS)
        assert f"| {paper} | {cells} |" in PAGE.splitlines()
    assert f"{len(EVERY)} statements" in PAGE


def test_what_is_gone_is_found() -> None:
    path = "tests/docs/test_papers_statements.py"
    shown = f"`{path}::test_no_more`, `{path}::lost`, `benchmarks/no_more.py`"
    assert [lost(row) for row in statements(f"| D1 | it is | works | - | {shown} |")] == [
        [f"{path}::test_no_more", "benchmarks/no_more.py"]
    ]
