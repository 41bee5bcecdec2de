"""The files and commands of the page on job files, as printed, in an empty folder."""

import json
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from docs.test_pages import DOCS, blocks_in, succeed, texts, write_files

from penstock.train.job_file import find_job
from penstock.train.profile_job import built_model

PAGE = (DOCS / "guides" / "job-files.md").read_text(encoding="utf-8")
EXISTING, OWN = map(blocks_in, PAGE.split("\n## From functions\n"))
"""The blocks on existing models and data, and those on functions of one's own."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the first part, and some English text."""
    (tmp_path / "config.json").write_text(texts(EXISTING, "json")[0])
    (tmp_path / "text.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)[:9]))
    write_files(EXISTING, tmp_path)
    return tmp_path


@pytest.mark.timeout(600)
def test_a_configuration_and_a_text_become_a_verified_run_without_a_line_of_python(
    folder: Path,
) -> None:
    commands = texts(EXISTING, "console")[0].splitlines()
    assert len(commands) <= 5
    for command in commands:
        succeed(command.split(), folder)
    report = (folder / "run" / "report.html").read_text(encoding="utf-8")
    assert "model.layers" in report
    rows = list(map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()))
    assert rows[0]["verified"].startswith("equal to your module")
    assert len(rows) == 4
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_each_job_of_the_first_part_has_a_model_and_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    jobs = texts(EXISTING, "toml")
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
    write_files(OWN, tmp_path)
    # A block without a name shows some settings of a job: it is a job file too.
    (settings,) = texts((block for block in OWN if not block.file), "toml")
    (tmp_path / "variation.toml").write_text(settings)
    assert find_job(str(tmp_path / "variation.toml")).accumulate == 4
    commands = "".join(texts(OWN, "console")).splitlines()
    assert len(commands) == 7
    output = [succeed(command.split(), tmp_path) for command in commands][-1]
    # The last command is the script of one's own: its last line is a step and a loss.
    step, loss = output.splitlines()[-1].split()
    assert step == "50"
    assert float(loss) < 0.5
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
