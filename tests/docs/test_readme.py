import json
import re
import tomllib
from pathlib import Path
from typing import Any

from penstock.command_line import (
    bridge_commands,
    choose_command,
    cluster_commands,
    compare_command,
    doctor_command,
    init_command,
    job_commands,
    planning_commands,
    rehearse_command,
    simulate_command,
)
from penstock.command_line.options import with_options
from penstock.schedule.registry import FAMILIES
from penstock.search.search import PLANNERS

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


def test_planning_alone_installs_no_torch_and_the_tests_all_of_training() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert not [name for name in project["dependencies"] if name.startswith("torch")]
    assert "torch>=2.11" in extras["train"]
    assert all("penstock[train]" in extras[extra] for extra in ("test", "examples"))
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
        name: getattr(module, name)
        for module in (
            cluster_commands,
            bridge_commands,
            job_commands,
            planning_commands,
            rehearse_command,
            simulate_command,
            compare_command,
            choose_command,
            doctor_command,
            init_command,
        )
        for name in module.__all__
    }
    named = {"catalogue": "list", "export_plan": "export", "import_layout": "import"}
    commands |= {name: commands.pop(function) for function, name in named.items()}
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


def test_figures_of_the_first_page_are_those_of_the_benchmarks() -> None:
    text = " ".join(README.split())
    together = results("runtime")["end-to-end"][0]
    low, high = (f"{together[key]:.2f}" for key in ("least", "most"))
    assert f"**{together['faster']:.2f}** times as fast ({low} to {high} in five rounds)" in text

    rows = {(row["model"], row["cluster"]): row for row in results("planning")["rows"]}
    three = [rows["bert-48", f"dapple-{letter}"] for letter in "abc"]
    assert " is {:.2f}, {:.2f} and {:.2f} times ".format(*map(over_the_others, three)) in text
    gaps = (100 * answer_of(row)["gap"] for row in three)
    assert "more than {:.1f}, {:.1f} and {:.1f} % faster".format(*gaps) in text
    even = sorted(over_the_others(rows[key]) for key in rows if key[0] == "resnet-50")
    assert f"{even[0]:.2f} to {even[-1]:.2f} on six clusters" in text

    forty = sorted(abs(run["error"]) for run in results("prediction/forty_runs")["rows"])
    words = f"off by {50 * (forty[19] + forty[20]):.1f} % in the median and {100 * forty[39]:.1f} %"
    assert words in text
    shared_cores = both_runs("schedules")
    words = (
        f"predictions of eleven schedules were {least_and_most_too_short(shared_cores)} too short"
    )
    assert words in text
    worst = max(abs(run["error"]) for run in both_runs("wide"))
    assert f"the same eleven schedules were within {100 * worst:.1f} %" in text


def test_the_first_plan_of_start_here_is_that_of_the_benchmark() -> None:
    page = (ROOT / "docs" / "start-here.md").read_text(encoding="utf-8")
    rows = {(row["model"], row["cluster"]): row for row in results("planning")["rows"]}
    plan = answer_of(rows["bert-48", "dapple-a"])
    count = plan["micro_batches"]
    stages, order = plan["stages"].count(":") + 1, plan["schedule"]
    assert (
        f"\nsearch: {stages} stages x 2 replicas, 3 on each device, {order}; {count} micro-" in page
    )
    milliseconds, gap = 1e3 * plan["iteration_s"], 100 * plan["gap"]
    assert f"\niteration {milliseconds:.0f} ms, {gap:.1f} % above the bound" in page


def results(name: str) -> Any:
    """Those of a benchmark, or those in one of its files."""
    path = ROOT / "benchmarks" / (f"{name}.json" if "/" in name else f"{name}/results.json")
    return json.loads(path.read_text(encoding="utf-8"))


def both_runs(kind: str) -> list[dict[str, Any]]:
    """The predictions on four workers that share two cores, which were made twice."""
    runs = (f"prediction/{kind}_4_workers{which}" for which in ("_first", ""))
    return [row for run in runs for row in results(run)["rows"]]


def least_and_most_too_short(runs: list[dict[str, Any]]) -> str:
    """How far predictions were below the measured time, as a share of the latter."""
    errors = sorted(1 - run["predicted_s"] / run["measured_s"] for run in runs)
    return f"{100 * errors[0]:.0f} to {100 * errors[-1]:.0f} %"


def answer_of(row: dict[str, Any]) -> dict[str, Any]:
    (answer,) = (answer for answer in row["answers"] if answer["planner"] == "search")
    return answer


def over_the_others(row: dict[str, Any]) -> float:
    """The best plan of all other planners over that of `search`."""
    others = [a["iteration_s"] for a in row["answers"] if a["planner"] != "search"]
    return min(filter(None, others)) / answer_of(row)["iteration_s"]
