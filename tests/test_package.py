"""What people and tools find in the package besides its code."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from scripts import ROOT
from typer.main import get_command

import penstock as package
from penstock.cli import COMMANDS, app_of

VERBS = """
Add Allow Build Carry Change Checkpoint Compare Compute Continue Count Do Draw End Estimate Fail
Find Fix Follow Force Give Keep Leave Limit List Measure Move Name Place Plan Price Print Read Run
Say Search Set Shard Show Simulate Start Stop Take Train Try Use Write
"""

DISTRIBUTIONS = {"sklearn": "scikit-learn", "pydantic_core": "pydantic"}
"""Distributions whose modules have other names."""


def test_type_checkers_find_the_annotations() -> None:
    assert (files("penstock") / "py.typed").is_file()


def test_the_version_is_told(penstock: Callable[..., Any]) -> None:
    assert package.__version__ == version("penstock")
    for option in ("--version", "-V"):
        answer = penstock(option)
        assert (answer.code, answer.output) == (0, f"penstock {package.__version__}\n")


def test_help_says_what_each_command_does_to_the_end(penstock: Callable[..., Any]) -> None:
    lines = penstock("--help").output.splitlines()
    shown = [line for line in lines[lines.index("Plan:") :] if line]
    assert [line for line in shown if line.endswith(":")] == ["Plan:", "Train:", "Inspect:"]
    commands = [line for line in shown if not line.endswith(":")]
    assert [line.split()[0] for line in commands] == list(COMMANDS)
    assert [line for line in commands if not line.endswith(".")] == []
    assert "..." not in "".join(commands)


def test_each_help_begins_with_a_verb_and_0_never_stands_for_none() -> None:
    commands: Any = vars(get_command(app_of()))["commands"]
    helps = {(name,): command.help for name, command in commands.items()}
    for name, command in commands.items():
        helps |= {(name, each.name): each.help for each in command.params}
    assert {key: text for key, text in helps.items() if text.split()[0] not in VERBS.split()} == {}
    assert {key: text for key, text in helps.items() if "(0" in text} == {}


def test_extras_list_what_the_code_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = {name: names_of(extras[name]) for name in extras if name not in ("test", "docs")}
    planning = names_of(project["dependencies"])
    assert imported_by("src/penstock") - planning == set.union(*listed.values()) - {"ray"}
    assert imported_by("examples") <= planning | set.union(*listed.values())


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ]", each)[0] for each in requirements} - {"penstock"}


def imported_by(folder: str) -> set[str]:
    """The distributions that the code of a folder imports, wherever it does."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    found = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    own = {"penstock", "", *(path.stem for path in (ROOT / folder).glob("loop_*.py"))}
    return {DISTRIBUTIONS.get(name, name) for name in found - own}


def test_the_citation_is_of_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {package.__version__}" in lines


def test_a_source_distribution_has_what_the_tests_read() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packed = {name.strip("/*") for name in project["tool"]["scikit-build"]["sdist"]["include"]}
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    read = {name for text in texts for name in re.findall(r'ROOT / "([\w.]+)', text)}
    assert {"examples", "benchmarks", "docs"} <= read
    there = {name for name in read if (ROOT / name).exists()}
    assert {name for name in there if not name.endswith(".md")} - packed == set()
