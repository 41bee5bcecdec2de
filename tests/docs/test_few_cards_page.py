"""The commands of the part on a few cards, as printed, answer what it says."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docs.test_pages import DOCS, blocks_in, succeed, texts, write_files

from penstock.measure.hardware import hardware_named

PAGE = DOCS / "guides" / "large-models.md"
_, _, TEXT = PAGE.read_text(encoding="utf-8").partition("\n## Fine-tune on a few cards\n")
BLOCKS = blocks_in(TEXT)
PARAMETERS_OF_LLAMA_8B = 8_030_261_248


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_plan_what_the_page_says(
    penstock: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    Path("config.json").write_text(texts(BLOCKS, "json")[0], encoding="utf-8")
    write_files(BLOCKS, tmp_path)
    consoles = texts(BLOCKS, "console")
    for commands, expected in zip(consoles, texts(BLOCKS, "text"), strict=True):
        printed = [succeed(shlex.split(line), tmp_path) for line in commands.splitlines()][-1]
        assert [line.rstrip() for line in printed.splitlines()] == expected.splitlines()
    rates: list[str] = []
    for name in ("full", "nf4"):
        told = succeed(["penstock", "simulate", f"{name}-plan.json", "--json"], tmp_path)
        rates.append(f"{round(json.loads(told)['tokens_per_s'], -1):,.0f}")
    rows = re.findall(r"^\| the plan above, .* \| \| ([\d,]+) \|$", TEXT, re.M)
    assert rows == rates
    host = Path("two-4090.toml")
    host.write_text(host.read_text().replace('"256 GB"', '"50 GB"'))
    refused = penstock(*shlex.split(consoles[0].splitlines()[-1])[1:])
    assert "have 50.0 GB (key memory)" in refused.errors


def test_what_a_published_rate_means_for_a_card() -> None:
    """The page says 150 TFLOP/s, nine tenths of the peak, and that estimates assume under six."""
    (two,) = re.findall(r"^\| RoundPipe.* \| ([\d,]+) \|$", TEXT, re.M)
    flops = 6 * PARAMETERS_OF_LLAMA_8B * int(two.replace(",", "")) / 2
    card = hardware_named("RTX4090-24GB")
    assert flops == pytest.approx(150e12, rel=0.01)
    assert flops / card.half_flops_per_s == pytest.approx(0.9, abs=0.02)
    assert card.sustained_share * card.product_share < 0.6
