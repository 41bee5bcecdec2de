"""The commands of the page on large models, exactly as printed, after its program."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "large-models.md"
TEXT, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## Fine-tune on a few cards\n")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)


def run(command: list[str], folder: Path) -> str:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_program_and_commands_print_and_plan_what_the_page_says(tmp_path: Path) -> None:
    program: list[str] = []
    for language, text in BLOCKS:
        if match := re.match(r"# (\S+\.(?:py|toml))\n", text):
            (tmp_path / match[1]).write_text(text, encoding="utf-8")
        elif language == "python":
            program.append(text)
    (tmp_path / "program.py").write_text("\n\n".join(program), encoding="utf-8")
    printed = run([sys.executable, "program.py"], tmp_path)
    said = [text for language, text in BLOCKS if language == "text"]
    assert len(said) == 2
    assert [text for text in said if text not in printed] == []

    commands = re.findall(
        r"^(.+)$", "".join(text for language, text in BLOCKS if language == "console"), re.M
    )
    assert len(commands) == 6
    for command in commands:
        run(command.split(), tmp_path)
    plan_8b, plan_70b = (
        json.loads((tmp_path / f"{name}.predicted.json").read_text(encoding="utf-8"))
        for name in ("plan-8b", "plan-70b")
    )
    expected, narrowed = (float(re.search(r"([\d.]+) s a step", text)[1]) for text in said)  # type: ignore[index]
    assert plan_8b["iteration_s"] == pytest.approx(expected, rel=0.03)
    assert plan_8b["gap"] == pytest.approx(0.018, abs=0.002)
    assert plan_70b["iteration_s"] <= narrowed
    assert plan_70b["iteration_s"] == pytest.approx(25.6, abs=0.1)
    assert plan_70b["lower_bound_s"] == pytest.approx(16.9, abs=0.1)
    whole = json.loads((tmp_path / "plan-70b.json").read_text(encoding="utf-8"))
    assert (len(whole["stages"]), whole["micro_batch_size"]) == (16, 16)
    assert "<svg" in (tmp_path / "plan-8b.svg").read_text(encoding="utf-8")
    assert (tmp_path / "plan-70b.html").stat().st_size > 0
