import re
import tomllib
from pathlib import Path

from penstock.command_line import (
    compare_command,
    job_commands,
    planning_commands,
    simulate_command,
)
from penstock.schedule.registry import FAMILIES
from penstock.search.registry import PLANNERS

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def set_up_commands() -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [block.strip() for block in blocks if "pip install" in block]


def test_there_are_two_set_up_commands_each_one_line() -> None:
    train, test = set_up_commands()
    assert train.endswith("penstock train") and test.endswith("pytest")
    assert "\n" not in train + test


def test_ci_runs_the_test_command_of_the_readme_word_for_word() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert set_up_commands()[1] in [line.strip() for line in script]


def test_start_here_gives_the_same_command_as_the_readme() -> None:
    assert set_up_commands()[0] in (ROOT / "docs" / "start-here.md").read_text(encoding="utf-8")
    assert set_up_commands()[1] in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_planner_and_schedule_is_named_in_the_readme() -> None:
    for name in (*PLANNERS, *FAMILIES):
        assert f"`{name}`" in README


def test_every_dependency_has_a_known_good_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["examples"]]
    names = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in wanted}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    known = {line.partition("==")[0] for line in lines if "==" in line}
    assert names <= known
    assert "torch==2.13.0" in lines


def test_the_command_line_reference_names_every_command_and_option() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    sections = {
        heading.split()[1]: text
        for heading, text in re.findall(
            r"^## (penstock [^\n]*)\n(.*?)(?=^## |\Z)", page, re.M | re.S
        )
    }
    commands = {
        name: getattr(module, name)
        for module in (job_commands, planning_commands, simulate_command, compare_command)
        for name in module.__all__
    }
    commands["list"] = commands.pop("catalogue")
    assert set(sections) == set(commands)
    shared = {"as_json", "quiet", "out", "return"}
    arguments = {"job", "run_directory"}
    for name, function in commands.items():
        positional = arguments | ({"profile"} if name in ("plan", "compare") else set())
        positional |= {"plan"} if name == "simulate" else set()
        for option in set(function.__annotations__) - shared - positional:
            assert f"--{option.replace('_', '-')}" in sections[name], (name, option)
