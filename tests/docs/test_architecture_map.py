"""The map of concepts names every term of the glossary, and files that define it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "how-it-works" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([\w -]+) \| `([\w/]+\.py)` \| `(\w+)` \|$", re.MULTILINE)
TERMS = re.findall(
    r"^\*\*(.+)\*\*$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
)


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


def plain(text: str) -> str:
    """Words without case, hyphens and line ends."""
    return " ".join(re.split(r"[\s_-]+", text.lower()))


def test_the_map_has_the_terms_of_the_glossary() -> None:
    assert len(TERMS) > 30
    assert [concept for concept, _, _ in ROW.findall(PAGE)] == TERMS


def test_each_file_of_the_map_defines_its_concept() -> None:
    wrong: list[str] = []
    for concept, path, name in ROW.findall(PAGE):
        file = ROOT / "src" / "penstock" / path
        if not file.is_file():
            wrong.append(f"{concept}: no file {path}")
            continue
        source = file.read_text(encoding="utf-8")
        if name not in defined_in(source):
            wrong.append(f"{concept}: {path} does not define {name}")
        if plain(concept) not in plain(source):
            wrong.append(f"{concept}: {path} does not speak of it")
    assert "\n".join(wrong) == ""


PACKAGE_ROW = re.compile(r"^\| ([`\w, *]+) \| ([\d,]+) \|", re.MULTILINE)


def source_lines(name: str) -> int:
    """Lines of Python and C++ of a package, or of a file at the top."""
    place = ROOT / "src" / "penstock" / name
    files = [file for kind in ("py", "cpp", "hpp") for file in place.rglob(f"*.{kind}")]
    return sum(file.read_bytes().count(b"\n") for file in files or [place.with_suffix(".py")])


def test_the_lines_of_every_package_are_those_of_its_row() -> None:
    told = {
        tuple(re.findall(r"`(\w+)`", cell)): int(lines.replace(",", ""))
        for cell, lines in PACKAGE_ROW.findall(PAGE)
    }
    in_all = told.pop(())
    counted = {names: sum(map(source_lines, names)) for names in told}
    far = {
        names: lines
        for names, lines in counted.items()
        if abs(lines - told[names]) > max(100, lines // 10)
    }
    assert far == {}
    rooms = {p.stem for p in (ROOT / "src" / "penstock").glob("[a-z]*") if p.name != "py.typed"}
    assert rooms == {name for names in told for name in names}
    assert abs(sum(counted.values()) - in_all) <= in_all // 20


def test_the_walk_of_a_job_names_files_and_what_they_define() -> None:
    page = (DOCS / "how-it-works" / "runtime.md").read_text(encoding="utf-8")
    walk = page.partition("## The walk of a job")[2].partition("\n## ")[0]
    paths = re.findall(r"`([\w/]+\.py)`", walk)
    assert len(paths) == 19
    sources = [(ROOT / "src" / "penstock" / path).read_text(encoding="utf-8") for path in paths]
    names = set(re.findall(r"`([a-z]+_[a-z_]+)`", walk))
    assert {"run_rank", "costs_of", "planned_part", "train_part"} < names
    assert names - set().union(*map(defined_in, sources)) == set()


def test_the_walk_of_a_plan_names_files_and_what_they_define() -> None:
    walk = PAGE.partition("## The walk of a plan")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`(?:,\s+`(\w+)`)?", walk)
    assert len(named) == 19
    for path, name in named:
        source = (ROOT / "src" / "penstock" / path).read_text(encoding="utf-8")
        assert not name or name in defined_in(source), (path, name)


def test_a_name_that_is_only_imported_is_not_defined() -> None:
    assert defined_in("from a import B\nC: int = 1\nD = 2\ndef e(): ...\nclass F: ...") == {
        *("C", "D", "e", "F")
    }
