"""What is gone is refused in one line that names what to use instead."""

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import RENAMED
from penstock.cli import run
from penstock.command_line.options import REMOVED_OPTIONS
from penstock.errors import BadInput
from penstock.jobs.job_file import KEYS, REMOVED_KEYS, read_job
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.world import join_world
from penstock.runtime.removed import IN_GROUPS, REMOVED_ARGUMENTS, REMOVED_VARIABLES
from penstock.runtime.settings import Safety, Update


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_key_of_a_job(tmp_path: Path, key: str) -> None:
    assert key not in KEYS
    file = tmp_path / "job.toml"
    file.write_text(f'base = "gpt-text"\n{key} = true\n')
    with pytest.raises(BadInput, match=f"'{key}' is no key any more: {REMOVED_KEYS[key][:20]}"):
        read_job(file)


@pytest.mark.parametrize("name", REMOVED_ARGUMENTS)
def test_an_argument_of_a_pipeline(name: str) -> None:
    unused: Any = None
    with pytest.raises(BadInput, match=f"^{name} is no argument any more: "):
        Pipeline(unused, unused, unused, **{name: unused})


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_of_the_package_works_and_warns(name: str) -> None:
    with pytest.warns(FutureWarning, match=f"^penstock.{name} is an old name: write Pipeline"):
        old = getattr(penstock, name)
    model, batch = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.ones(2, 2)
    graph = penstock.capture_model(model, (batch, batch), loss=torch.nn.functional.mse_loss)
    plan = penstock.Plan(
        tuple(penstock.Stage(range(n, n + 1), (n,), (1,)) for n in (0, 1)), 2, 1, "1f1b"
    )
    expected = torch.nn.functional.mse_loss(model(batch), batch).item()
    with old(graph, plan, (batch, batch), optimizer=torch.optim.SGD) as pipe:
        assert pipe.step((batch, batch)).loss == pytest.approx(expected)


@pytest.mark.parametrize("group", [Update, Safety])
def test_every_option_of_a_group_but_the_new_ones_was_an_argument(group: type) -> None:
    new = {"meet_every", "outer_learning_rate", "outer_momentum"}
    new |= {"schedule_follows", "gradient_dtype"}
    options = (option.name for option in fields(group))
    assert IN_GROUPS[group.__name__] == tuple(name for name in options if name not in new)


@pytest.mark.parametrize("name", REMOVED_VARIABLES)
def test_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(BadInput, match=f"^variable {name} has no effect any more: "):
        join_world("cpu", 60.0)


@pytest.mark.parametrize(("command", "option", "value"), REMOVED_OPTIONS)
def test_an_option(
    command: str,
    option: str,
    value: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = command or "train"
    monkeypatch.setattr(sys, "argv", ["penstock", name, "x", option, *([value] if value else [])])
    assert run() == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"penstock: error: penstock {name} has no {option}")
    assert printed.endswith(f" any more: {REMOVED_OPTIONS[command, option, value]}\n")


def test_the_page_for_those_who_come_from_0_1_names_all_of_it() -> None:
    page = Path(__file__).parents[1] / "docs" / "guides" / "coming-from-0-1.md"
    named = set(re.findall(r"[\w-]+", page.read_text(encoding="utf-8")))
    gone = {*RENAMED, *REMOVED_ARGUMENTS, *REMOVED_VARIABLES, *REMOVED_KEYS}
    gone |= {value or option for _, option, value in REMOVED_OPTIONS}
    assert gone - named == set()
