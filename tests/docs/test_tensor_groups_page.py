"""The guide to tensor groups: its script trains as one device, and its plan has groups."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from docs.test_pages import (
    DOCS,
    blocks_of,
    command_of,
    losses_in,
    plain_losses,
    run_in_a_fork,
    succeed,
    texts,
    write_files,
)
from scripts import script_at
from started_scripts import as_torchrun_would

PAGE = DOCS / "guides" / "tensor-groups.md"
COMMANDS = [text.splitlines() for text in texts(blocks_of(PAGE), "console")]


def test_the_script_trains_as_one_device_does(tmp_path: Path) -> None:
    write_files(blocks_of(PAGE), tmp_path)
    printed = as_torchrun_would(command_of(PAGE, "train.py"), tmp_path)
    small = script_at(str(tmp_path / "small.py"), "small_of_the_guide")
    plain = plain_losses(small, partial(torch.optim.AdamW, lr=0.01), 20)
    assert losses_in(printed) == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_the_job_trains_and_measures_groups(tmp_path: Path) -> None:
    write_files(blocks_of(PAGE), tmp_path)
    (command,) = COMMANDS[2]
    printed = succeed([*command.split(), "--out", "run", "--json"], tmp_path)
    assert json.loads(printed)["steps"] == 20
    profile = json.loads((tmp_path / "run" / "profile.json").read_text(encoding="utf-8"))
    assert [entry["ranks"] for entry in profile["tensor_parallel"]["factors"]] == [2]


def test_the_planner_chooses_groups_for_the_llama(tmp_path: Path) -> None:
    (example,) = (block.text for block in blocks_of(PAGE) if block.is_example)
    (tmp_path / "profile.py").write_text(example, encoding="utf-8")
    run_in_a_fork(tmp_path, "profile.py")
    plan, simulate = COMMANDS[1]
    succeed(plan.split(), tmp_path)
    whole = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert max(map(len, whole["tensor_groups"])) > 1
    assert "tensor groups: device 0 is ranks 0, 1" in succeed(simulate.split(), tmp_path)
