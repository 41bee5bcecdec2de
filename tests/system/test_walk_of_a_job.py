"""Until its first step a job goes through what the page on the runtime names, and no more."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MOST_MODULES = 14

NOTED = '''
"""Notes the modules whose functions are entered: here, and in the rank that imports this."""

import json, os, sys
from pathlib import Path

import penstock

SOURCE = str(Path(penstock.__file__).parent) + "/"
FUNCTION = 1  # of the flags of code: not a module's or a class's own
entered = set()


def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & FUNCTION and code.co_filename.startswith(SOURCE):
        entered.add(code.co_filename.removeprefix(SOURCE))


def write(name):
    sys.setprofile(None)
    (Path(__file__).parent / f"{name}.json").write_text(json.dumps(sorted(entered)))


def first_step(pipe, event):
    if not (Path(__file__).parent / f"rank{pipe.rank}.json").exists():
        write(f"rank{pipe.rank}")


sys.setprofile(note)
'''

LAUNCHER = """
import sys
import noted
from penstock.cli import run

if __name__ == "__main__":
    code = run()
    noted.write("launcher")
    sys.exit(code)
"""


def of_jobs(modules: list[str]) -> set[str]:
    return {m for m in modules if m == "cli.py" or m.startswith(("commands/", "train/"))}


@pytest.mark.timeout(600)
def test_a_job_enters_few_modules_until_its_first_step_and_the_page_names_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "noted.py").write_text(NOTED)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "mine.toml").write_text(
        'base = "gpt-text"\nsteps = 1\nbatch_size = 4\ncallbacks = ["noted:first_step"]\n'
    )
    command = [sys.executable, "launcher.py", "train", "mine.toml", "--workers", "2"]
    done = subprocess.run(
        [*command, "--quiet", "-o", "run"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {
        name: of_jobs(json.loads((tmp_path / f"{name}.json").read_text()))
        for name in ("launcher", "rank0")
    }
    assert "train/training_loop.py" in found["rank0"] - found["launcher"]
    entered = found["launcher"] | found["rank0"]
    assert len(entered) <= MOST_MODULES, sorted(entered)
    page = (ROOT / "docs/how-it-works/architecture.md").read_text(encoding="utf-8")
    walk = page.partition("## The walk of a job")[2].partition("\n## ")[0]
    assert entered <= set(re.findall(r"`([\w/]+\.py)`", walk))
