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


PACKAGE_ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| .* \| .* \|$", re.MULTILINE)


def test_every_package_has_its_row() -> None:
    table = PAGE.partition("## The packages")[2].partition("\n## ")[0]
    named = [name for cell in PACKAGE_ROW.findall(table) for name in re.findall(r"\w+", cell)]
    rooms = {p.stem for p in (ROOT / "src" / "penstock").glob("[a-z]*") if p.name != "py.typed"}
    assert sorted(named) == sorted(rooms)


def test_the_walk_of_a_job_names_files_and_what_they_define() -> None:
    page = (DOCS / "how-it-works" / "runtime.md").read_text(encoding="utf-8")
    walk = page.partition("## The walk of a job")[2].partition("\n## ")[0]
    paths = re.findall(r"`([\w/]+\.py)`", walk)
    assert len(paths) == 20
    sources = [(ROOT / "src" / "penstock" / path).read_text(encoding="utf-8") for path in paths]
    names = set(re.findall(r"`([a-z]+_[a-z_]+)`", walk))
    assert {"run_rank", "costs_of", "planned_part", "train_part"} < names
    assert names - set().union(*map(defined_in, sources)) == set()


def test_the_walk_of_a_plan_names_files_and_what_they_define() -> None:
    walk = PAGE.partition("## The walk of a plan")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`(?:,\s+`(\w+)`)?", walk)
    assert len(named) == 21
    for path, name in named:
        source = (ROOT / "src" / "penstock" / path).read_text(encoding="utf-8")
        assert not name or name in defined_in(source), (path, name)


def test_a_name_that_is_only_imported_is_not_defined() -> None:
    assert defined_in("from a import B\nC: int = 1\nD = 2\ndef e(): ...\nclass F: ...") == {
        *("C", "D", "e", "F")
    }
