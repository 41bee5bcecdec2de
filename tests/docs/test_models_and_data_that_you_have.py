"""The guide's files and commands, as printed: from a configuration and a text to a verified run."""

import json
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from penstock.jobs.job_file import find_job
from penstock.jobs.profile_job import built_model

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "models-and-data-that-you-have.md"


def blocks(language: str) -> list[str]:
    """The guide's code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The guide's files, and some English text."""
    (tmp_path / "config.json").write_text(blocks("json")[0])
    (tmp_path / "text.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)[:9]))
    (tmp_path / "my_pictures.py").write_text(blocks("python")[0])
    return tmp_path


@pytest.mark.timeout(600)
def test_a_configuration_and_a_text_become_a_verified_run_without_a_line_of_python(
    folder: Path,
) -> None:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}
    commands = blocks("console")[0].splitlines()
    assert len(commands) <= 5
    errors = ""
    for command in commands:
        done = subprocess.run(
            command.split(), cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        errors = done.stderr
    assert "step 1: equal to your module" in errors
    report = (folder / "run" / "report.html").read_text(encoding="utf-8")
    assert "model.layers" in report
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_each_job_of_the_guide_has_a_model_and_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    jobs = blocks("toml")
    assert len(jobs) == 3
    for number, text in enumerate(jobs):
        path = folder / f"job{number}.toml"
        path.write_text(text)
        job = find_job(path)
        assert sum(parameter.numel() for parameter in built_model(job).parameters()) > 0
        assert len(list(islice(job.batches("train"), 5))) == 5
        assert list(islice(job.batches("held-out"), 1))
