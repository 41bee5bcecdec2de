"""The commands of the part on a few cards, as printed, answer what it says."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.measure.hardware import hardware_named

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "large-models.md"
_, _, TEXT = PAGE.read_text(encoding="utf-8").partition("\n## Fine-tune on a few cards\n")
PARAMETERS_OF_LLAMA_8B = 8_030_261_248


def run(line: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-c", "from penstock.cli import main; main()"]
    return subprocess.run(
        [*program, *shlex.split(line)[1:]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_plan_what_the_page_says(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)
    texts: dict[str, list[str]] = {}
    for language, text in blocks:
        texts.setdefault(language, []).append(text)
    (tmp_path / "config.json").write_text(texts["json"][0], encoding="utf-8")
    for text in (*texts["toml"], *texts["python"]):
        (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    for commands, expected in zip(texts["console"], texts["text"], strict=True):
        printed = ""
        for line in commands.splitlines():
            done = run(line, tmp_path)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            printed = done.stdout
        assert [line.rstrip() for line in printed.splitlines()] == expected.splitlines()
    rates: list[str] = []
    for name in ("full", "nf4"):
        told = run(f"penstock simulate {name}-plan.json --json", tmp_path)
        rates.append(f"{round(json.loads(told.stdout)['tokens_per_s'], -1):,.0f}")
    rows = re.findall(r"^\| the plan above, .* \| \| ([\d,]+) \|$", TEXT, re.M)
    assert rows == rates
    host = (tmp_path / "two-4090.toml").read_text().replace('"256 GB"', '"50 GB"')
    (tmp_path / "two-4090.toml").write_text(host)
    refused = run(texts["console"][0].splitlines()[-1], tmp_path)
    assert "have 50.0 GB (key memory)" in refused.stderr


def test_what_a_published_rate_means_for_a_card() -> None:
    """The page says 150 TFLOP/s, nine tenths of the peak, and that estimates assume under six."""
    (two,) = re.findall(r"^\| RoundPipe.* \| ([\d,]+) \|$", TEXT, re.M)
    flops = 6 * PARAMETERS_OF_LLAMA_8B * int(two.replace(",", "")) / 2
    card = hardware_named("RTX4090-24GB")
    assert flops == pytest.approx(150e12, rel=0.01)
    assert flops / card.half_flops_per_s == pytest.approx(0.9, abs=0.02)
    assert card.sustained_share * card.product_share < 0.6
