"""The architecture page names every package, and files that define what it names."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "how-it-works" / "architecture.md").read_text(encoding="utf-8")


def defined_in(source: str) -> set[str]:
    """The classes, functions and constants at the top of a file."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                names.add(node.name)
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                names.add(name)
            case _:
                pass
    return names


PACKAGE_ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| .* \|$", re.MULTILINE)


def test_the_eight_files_define_what_they_show() -> None:
    table = PAGE.partition("## Read these eight files first")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == 8
    for path, shows in rows:
        names = set(re.findall(r"`(\w+)`", shows))
        assert names <= defined_in((ROOT / "src" / "penstock" / path).read_text("utf-8")), path


def test_every_package_has_its_row() -> None:
    table = PAGE.partition("## The packages")[2].partition("\n## ")[0]
    named = [name for cell in PACKAGE_ROW.findall(table) for name in re.findall(r"\w+", cell)]
    rooms = {p.stem for p in (ROOT / "src" / "penstock").glob("[a-z]*") if p.name != "py.typed"}
    assert sorted(named) == sorted(rooms)


def test_the_walk_of_a_job_names_files_and_what_they_define() -> None:
    walk = PAGE.partition("## The walk of a job")[2].partition("\n## ")[0]
    paths = re.findall(r"`([\w/]+\.py)`", walk)
    assert len(paths) == 20
    sources = [(ROOT / "src" / "penstock" / path).read_text(encoding="utf-8") for path in paths]
    names = set(re.findall(r"`([a-z]+_[a-z_]+)`", walk))
    assert {"run_rank", "costs_of", "planned_part", "train_part"} < names
    assert names - set().union(*map(defined_in, sources)) == set()


def test_the_walk_of_a_plan_names_files_and_what_they_define() -> None:
    walk = PAGE.partition("## The walk of a plan")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`(?:,\s+`(\w+)`)?", walk)
    assert len(named) == 20
    for path, name in named:
        source = (ROOT / "src" / "penstock" / path).read_text(encoding="utf-8")
        assert not name or name in defined_in(source), (path, name)


def test_a_name_that_is_only_imported_is_not_defined() -> None:
    assert defined_in("from a import B\nC: int = 1\nD = 2\ndef e(): ...\nclass F: ...") == {
        *("C", "D", "e", "F")
    }
