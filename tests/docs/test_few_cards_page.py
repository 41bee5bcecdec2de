"""The commands of the page on a few cards, as printed, answer what it says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "few-cards.md"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_plan_what_the_page_says(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    texts = {language: text for language, text in blocks}
    (tmp_path / "config.json").write_text(texts["json"], encoding="utf-8")
    (tmp_path / "two-4090.toml").write_text(texts["toml"], encoding="utf-8")
    printed = ""
    for line in texts["console"].splitlines():
        program = [sys.executable, "-c", "from penstock.cli import main; main()"]
        done = subprocess.run(
            [*program, *shlex.split(line)[1:]],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        printed = done.stdout
    assert printed.startswith(texts["text"])
    assert "FSDP does not fit; " in printed
    assert "57.1 s by FSDP, optimizer state in host memory (22.2 GB)" in printed
    assert "naive split, one card at a time does not fit" in printed
