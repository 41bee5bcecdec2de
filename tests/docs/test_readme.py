import re
import tomllib
from importlib import import_module
from pathlib import Path

from penstock.cli import COMMANDS
from penstock.commands.options import with_options
from penstock.planners.search.search import PLANNERS
from penstock.schedule.registry import FAMILIES

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 120
"""A reader has two minutes."""


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


def test_every_planner_is_in_the_table_of_its_page() -> None:
    page = (ROOT / "docs" / "planners.md").read_text(encoding="utf-8")
    table = re.findall(r"^\|([^|]*)\|", page.partition("```python")[0], re.MULTILINE)
    for name in PLANNERS:
        assert f"`{name}`" in " ".join(table)


def test_the_counts_of_planners_and_schedules_are_today_s() -> None:
    assert f"{len(FAMILIES)} schedules, {len(PLANNERS)} planners" in README
    assert len(README.splitlines()) <= MOST_LINES


def test_planning_alone_installs_no_torch_and_the_tests_all_of_training() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert not [name for name in project["dependencies"] if name.startswith("torch")]
    assert "torch>=2.11" in extras["train"]
    assert "penstock[examples]" in extras["test"]
    assert extras["examples"][0] == "penstock[train,plot,hf,lightning]"
    assert all("penstock[train]" in extras[name] for name in ("hf", "lightning"))
    assert "'.[train]'" in set_up_commands()[0]


def test_every_dependency_has_a_known_good_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]
    names = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in wanted} - {"penstock"}
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
        name: getattr(import_module(f"penstock.commands.{place}"), function)
        for name, (place, function) in ((n, p.split(".")) for n, p in COMMANDS.items())
    }
    assert set(sections) == set(commands)
    shared = {"as_json", "quiet", "out", "return"}
    arguments = {"job", "run_directory", "layout"}
    words = {"target": "to", "source": "from", "config": "from", "changes": "set", "dtype": "type"}
    words["tries"] = "try"
    for name, function in commands.items():
        positional = arguments | ({"profile"} if name in ("plan", "compare", "choose") else set())
        positional |= {"plan"} if name in ("simulate", "rehearse", "export") else set()
        for option in set(with_options(function).__annotations__) - shared - positional:
            word = words.get(option, option)
            assert f"--{word.replace('_', '-')}" in sections[name], (name, option)
