"""The papers, statement by statement: a verdict each, and what it rests on exists."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "benchmarks" / "papers-statements.md").read_text(encoding="utf-8")
VERDICTS = ("works", "differs", "missing")
STATEMENTS = {"DAPPLE": ("D", 31), "SpecTrain": ("T", 16), "SPP": ("P", 14), "BaPipe": ("B", 24)}
SECTION = re.compile(r"^## (\w+)$\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\([\w./-]+\.md#[\w-]+\)")


class Statement(NamedTuple):
    """A row of a table of a paper."""

    number: str
    says: str
    verdict: str
    here: str


def rows(text: str, columns: int) -> Iterator[list[str]]:
    """The rows of tables of so many columns that begin with the number of a statement."""
    for line in text.splitlines():
        cells = line.strip("| ").split(" | ")
        if re.fullmatch(r"[A-Z]\d+", cells[0]) and len(cells) == columns:
            yield cells


OF_PAPER = {p: [Statement(*row) for row in rows(text, 4)] for p, text in SECTION.findall(PAGE)}
EVERY = [statement for statements in OF_PAPER.values() for statement in statements]
SHOWN = {number: re.findall(r"`(.+?)`", names) for number, names in rows(PAGE, 2)}
"""Tests and scripts, by the number of a statement."""


@cache
def functions_of(path: str) -> set[str]:
    """The functions at the top of a file of the repository; none if it does not exist."""
    file = ROOT / path
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def exists(name: str) -> bool:
    """Whether there is such a test (a file of tests and a function of it) or such a script."""
    path, _, function = name.partition("::")
    if path.startswith("tests/"):
        return function.startswith("test_") and function in functions_of(path)
    return path.startswith("benchmarks/") and not function and (ROOT / path).is_file()


def test_every_statement_has_its_number_and_one_of_three_verdicts() -> None:
    assert {paper: [row.number for row in found] for paper, found in OF_PAPER.items()} == {
        paper: [f"{letter}{i + 1}" for i in range(count)]
        for paper, (letter, count) in STATEMENTS.items()
    }
    assert [row for row in EVERY if row.verdict not in VERDICTS] == []


def test_every_test_and_script_that_is_named_exists() -> None:
    assert [name for names in SHOWN.values() for name in names if not exists(name)] == []
    assert set(SHOWN) <= {row.number for row in EVERY}


def test_what_works_is_shown_by_a_test_or_a_script() -> None:
    works = {row.number for row in EVERY if row.verdict == "works"}
    assert works - {number for number, names in SHOWN.items() if names} == set()


def test_what_differs_or_is_missing_is_said_in_a_section() -> None:
    """That the section exists is tested with all links of the docs."""
    rest = [row for row in EVERY if row.verdict != "works"]
    assert [row for row in rest if not LINK.search(row.here)] == []


def test_counts_are_those_of_the_tables() -> None:
    counted = {paper: Counter(row.verdict for row in found) for paper, found in OF_PAPER.items()}
    counted[f"all {len(EVERY)}"] = Counter(row.verdict for row in EVERY)
    for paper, found in counted.items():
        cells = " | ".join(str(found[verdict]) for verdict in VERDICTS)
        assert f"| {paper} | {cells} |" in PAGE.splitlines()
    assert f"{len(EVERY)} statements" in PAGE


def test_what_is_gone_is_found() -> None:
    path = "tests/docs/test_papers_statements.py"
    assert exists(f"{path}::test_what_is_gone_is_found")
    gone = (f"{path}::test_no_more", f"{path}::exists", "tests/no.py::test_no", "benchmarks/no.py")
    assert not any(map(exists, gone))
