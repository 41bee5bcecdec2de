"""What people and tools find in the package besides its code."""

import re
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from scripts import ROOT

import penstock as package


def test_type_checkers_find_the_annotations() -> None:
    assert (files("penstock") / "py.typed").is_file()


def test_the_version_is_told(penstock: Callable[..., Any]) -> None:
    assert package.__version__ == version("penstock")
    for option in ("--version", "-V"):
        answer = penstock(option)
        assert (answer.code, answer.output) == (0, f"penstock {package.__version__}\n")


def test_help_says_what_each_command_does_to_the_end(penstock: Callable[..., Any]) -> None:
    lines = penstock("--help").output.splitlines()
    commands = lines[lines.index("Commands:") + 1 :]
    assert len(commands) > 10 and [line for line in commands if not line.endswith(".")] == []
    assert "..." not in "".join(commands)


def test_a_source_distribution_has_what_the_tests_read() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packed = {name.strip("/*") for name in project["tool"]["scikit-build"]["sdist"]["include"]}
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    read = {name for text in texts for name in re.findall(r'ROOT / "([\w.]+)', text)}
    assert {"examples", "benchmarks", "docs"} <= read
    there = {name for name in read if (ROOT / name).exists()}
    assert {name for name in there if not name.endswith(".md")} - packed == set()
