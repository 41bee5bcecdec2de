"""The architecture page names every package, and files that define what it names."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "how-it-works" / "architecture.md").read_text(encoding="utf-8")


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


def part(heading: str) -> str:
    """The part of the page below a heading."""
    return PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]


def names_in(path: str) -> set[str]:
    """What a file of the package defines."""
    return defined_in((ROOT / "src" / "penstock" / path).read_text(encoding="utf-8"))


def test_the_eight_files_define_what_they_show() -> None:
    rows = re.findall(
        r"^\| `([\w/]+\.py)` \| (.*) \|$", part("Read these eight files first"), re.MULTILINE
    )
    assert len(rows) == 8
    for path, shows in rows:
        assert set(re.findall(r"`(\w+)`", shows)) <= names_in(path), path


def test_every_package_has_its_row() -> None:
    cells = PACKAGE_ROW.findall(part("The packages"))
    named = [name for cell in cells for name in re.findall(r"\w+", cell)]
    rooms = {p.stem for p in (ROOT / "src" / "penstock").glob("[a-z]*") if p.name != "py.typed"}
    assert sorted(named) == sorted(rooms)


def test_the_walk_of_a_job_names_files_and_what_they_define() -> None:
    walk = part("The walk of a job")
    paths = re.findall(r"`([\w/]+\.py)`", walk)
    assert len(paths) == 20
    names = set(re.findall(r"`([a-z]+_[a-z_]+)`", walk))
    assert {"run_rank", "costs_of", "planned_part", "train_part"} < names
    assert names - set().union(*map(names_in, paths)) == set()


def test_the_walk_of_a_plan_names_files_and_what_they_define() -> None:
    named = re.findall(r"`([\w/]+\.py)`(?:,\s+`(\w+)`)?", part("The walk of a plan"))
    assert len(named) == 20
    for path, name in named:
        assert not name or name in names_in(path), (path, name)


def test_a_name_that_is_only_imported_is_not_defined() -> None:
    assert defined_in("from a import B\nC: int = 1\nD = 2\ndef e(): ...\nclass F: ...") == {
        *("C", "D", "e", "F")
    }
