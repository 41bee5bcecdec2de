"""On a terminal of 80 columns every figure of a table is there, whole."""

import re
from dataclasses import replace

import pytest
from commands.refusals import Penstock

from penstock.profile.model_profile import ModelProfile

NAME = "model.decoder.layers.{}.feed_forward.down_projection"


@pytest.fixture
def small_profile(small_profile: ModelProfile) -> ModelProfile:
    """The same layers with long names."""
    layers = (replace(one, name=NAME.format(k)) for k, one in enumerate(small_profile.layers))
    return replace(small_profile, layers=tuple(layers))


def cells(text: str) -> set[str]:
    """What stands in the lines of a text with two spaces between."""
    return {word.strip() for line in text.splitlines() for word in line.split("  ")} - {""}


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--planner", "dapple"],
        ["compare", "--planners", "dapple,gpipe,dynamic-program", "--schedules", "early-backward"],
    ],
    ids=["plan", "compare"],
)
def test_no_figure_is_cut(
    penstock: Penstock, problem: list[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    name, *options = command
    on_a_pipe = penstock(name, *problem, *options, "--quiet").output
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    colours = penstock(name, *problem, *options, "--quiet").output
    shown = re.sub("\x1b\\[[0-9;]*m", "", colours)
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    figures = {cell for cell in cells(on_a_pipe) if re.fullmatch(r"[\d.]+ (%|MB)|\d\.\d\d", cell)}
    assert len(figures) >= 5
    assert figures <= cells(shown)
