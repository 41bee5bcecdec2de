"""``penstock init`` writes jobs that are read, and writes over nothing."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from commands.refusals import Penstock, refused

from penstock.commands import init_command
from penstock.errors import BadInput
from penstock.train import samples
from penstock.train.job_file import find_job
from penstock.train.profile_job import built_model
from penstock.train.samples import TextData

CONFIG = """{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_head": 2,
"n_layer": 2, "vocab_size": 256, "max_position_embeddings": 24}"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(CONFIG)
    older = CONFIG.replace("max_position_embeddings", "n_positions")
    (tmp_path / "older.json").write_text(older)
    (tmp_path / "text.txt").write_text("one two three " * 400)
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\ndataset = [(torch.zeros(4), 1)] * 30\n"
        "def build():\n    return nn.Linear(4, 2)\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("--data", "text.txt"),
        ("--from", "config.json", "--data", "text.txt"),
        ("--from", "older.json", "--data", "text.txt"),
        ("--from", ".", "--data", "text.txt", "-o", "jobs/job.toml"),
        ("--from", "config.json"),
        ("--model", "mine:build", "--data", "mine:dataset"),
    ],
)
def test_what_it_writes_is_a_job(penstock: Penstock, folder: Path, given: tuple[str, ...]) -> None:
    (folder / "jobs").mkdir()
    answer = penstock("init", *given)
    assert answer.code == 0, answer.errors
    place = given[-1] if "-o" in given else "job.toml"
    text = (folder / place).read_text()
    assert text.count("#") > 8
    job = find_job(folder / place)
    assert sum(parameter.numel() for parameter in built_model(job).parameters()) > 0
    if given == ("--from", "config.json"):
        assert "next: penstock profile job.toml --estimate GPU" in answer.output
        job = replace(job, data=replace(cast(TextData, job.data), shape_only=True))
    batch = next(job.batches("train"), None)
    assert batch is not None
    if "--from" in given:
        assert batch["input_ids"].shape[1] == 24
        with pytest.raises(BadInput, match="windows of 25 tokens, and its model reads 24"):
            built_model(find_job(folder / place, ["text.length=25"]))
    refused(penstock("init", "-o", place), 2, "is not written over")
    assert (folder / place).read_text() == text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--from", "config.json", "--model", "mine:build"), "leave one of them out"),
        (("--from", "absent.json"), "does not exist"),
        (("--from", "mine.py"), "not valid JSON"),
        (("--data", "absent.txt"), "does not exist"),
        (("-o", "job.yaml"), "does not end in .toml"),
        (("-o", "absent/job.toml"), "absent"),
    ],
)
def test_what_it_cannot_use_is_refused_in_a_line(
    penstock: Penstock, folder: Path, given: tuple[str, ...], told: str
) -> None:
    refused(penstock("init", *given), 2, told)
    assert not (folder / "job.toml").exists()


def test_the_share_that_is_held_out_is_that_of_jobs_that_do_not_say_it() -> None:
    assert init_command.HELD_OUT == samples.HELD_OUT
