"""The commands of the page on other frameworks run as printed, and find what its table says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "other-frameworks.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)
ROW = re.compile(r"^\| (?:.+) \| `([\w-]+)` \| (\d+) ms \| ([\d.]+) % \|$", re.M)
COMMANDS = "".join(text for language, text in BLOCKS if language == "console")


@pytest.mark.timeout(600)
def test_the_commands_run_and_find_what_the_table_says(tmp_path: Path) -> None:
    for _, text in BLOCKS:
        if match := re.match(r"# ([\w.]+)\n", text):
            (tmp_path / match[1]).write_text(text, encoding="utf-8")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-e", "-c", COMMANDS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = ROW.findall(TEXT)
    assert [row[0] for row in rows] == ["1f1b", "1f1b", "zb-h1", "gpipe"]
    names = ("even", "plan", "zb", "naive")
    for (schedule, milliseconds, bubble), name in zip(rows, names, strict=True):
        found = json.loads((tmp_path / f"{name}.predicted.json").read_text(encoding="utf-8"))
        assert found["schedule"] == schedule
        assert round(1e3 * found["iteration_s"]) == int(milliseconds)
        assert f"{100 * found['bubble']:.1f}" == bubble
    layout = re.findall(r"^\| Penstock's.*?`(.+?)`", TEXT, re.M)[0].replace("\\|", "|")
    assert f"'{layout}'" in (tmp_path / "ours.txt").read_text(encoding="utf-8")
    torch = json.loads((tmp_path / "layout.json").read_text(encoding="utf-8"))
    assert torch["split_points"] == [f"model.layers.{block}" for block in (5, 10, 15)]
    assert torch["stages"][-1] == ["model.layers.15", "model.norm", "lm_head"]
    assert (tmp_path / "layout.csv").exists()


def test_the_page_names_every_framework() -> None:
    from penstock.integrations.bridges.formats import READERS, WRITERS

    assert {f"`{name}`" for name in WRITERS | READERS} <= set(re.findall(r"`[\w-]+`", TEXT))
