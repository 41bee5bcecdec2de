"""The files and commands of the page on job files, as printed, in an empty folder."""

import json
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from penstock.train.job_file import find_job
from penstock.train.profile_job import built_model

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "job-files.md").read_text(encoding="utf-8")
EXISTING, _, OWN = PAGE.partition("\n## From functions\n")
"""The part on existing models and data, and the part on functions of one's own."""


def blocks(language: str, part: str = EXISTING) -> list[str]:
    """The code blocks of one language in a part of the page."""
    return re.findall(rf"```{language}\n(.*?)```", part, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the first part, and some English text."""
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


def test_each_job_of_the_first_part_has_a_model_and_batches(
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_functions_become_a_run_and_a_script_as_printed(tmp_path: Path) -> None:
    for text in (*blocks("python", OWN), *blocks("toml", OWN)):
        name = re.match(r"# (\S+)\n", text)
        path = tmp_path / (name[1] if name else "variation.toml")
        path.write_text(text)
        # A block without a name shows some settings of a job: it is a job file too.
        assert name or find_job(str(path)).accumulate == 4
    commands = [line for block in blocks("console", OWN) for line in block.splitlines()]
    assert len(commands) == 7
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}
    output = ""
    for command in commands:
        done = subprocess.run(
            command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        output = done.stdout
    # The last command is the script of one's own: its last line is a step and a loss.
    step, loss = output.splitlines()[-1].split()
    assert step == "50"
    assert float(loss) < 0.5
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
