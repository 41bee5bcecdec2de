"""The guide's files and commands, exactly as printed, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.jobs.job_file import find_job

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "train-your-own-model.md"


def blocks(language: str) -> list[str]:
    """The guide's code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_guide_works_as_printed(tmp_path: Path) -> None:
    for text in (*blocks("python"), *blocks("toml")):
        name = re.match(r"# (\S+)\n", text)
        path = tmp_path / (name[1] if name else "variation.toml")
        path.write_text(text)
        # A block without a name shows some settings of a job: it is a job file too.
        assert name or find_job(str(path)).accumulate == 4
    commands = [line for block in blocks("console") for line in block.splitlines()]
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
