"""Commands that stand on pages run as printed; `test_pins.py` runs the pins of the guide."""

import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docs.test_pages import DOCS

REFERENCE, GUIDE = (
    (DOCS / page).read_text(encoding="utf-8")
    for page in ("reference/command-line.md", "guides/profile-and-plan.md")
)


@pytest.fixture
def run(
    penstock: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], list[Any]]:
    """Run the commands of a text that begin with a word, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_all(text: str, word: str) -> list[Any]:
        commands = re.findall(rf"^penstock ({word}.*)$", text, re.MULTILINE)
        return [penstock(*shlex.split(command)) for command in commands]

    return run_all


def test_the_commands_of_the_reference_run(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    answers = run(REFERENCE, "")
    assert [answer.errors for answer in answers if answer.code] == []
    _, gpipe = answers
    assert "schedule gpipe" in gpipe.output
    assert "<svg" in (tmp_path / "gpipe.svg").read_text(encoding="utf-8")


def test_the_comparison_of_the_guide_draws_its_picture(
    run: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (answer,) = run(GUIDE, "compare ")
    assert answer.code == 0, answer.errors
    assert "Why search won: " in answer.output
    drawn, shown = (
        " ".join(node.text for node in ET.parse(place).iter() if node.text)
        for place in (tmp_path / "compare.svg", DOCS / "pictures" / "compare.svg")
    )
    for planner in ("search (", "dapple (", "data-parallel ("):
        assert planner in drawn and planner in shown


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rehearsal_of_the_guide_runs(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    planned, rehearsed = run(GUIDE.partition("\n## Rehearse a plan\n")[2], "")
    assert planned.code == 0, planned.errors
    # On a busy machine the time may differ by more than the tolerance; all else may not.
    assert rehearsed.code == 0 or "of the plan's time" in rehearsed.errors, rehearsed.errors
    assert rehearsed.output.startswith("iteration ")
    assert "16 processes started in" in rehearsed.output
    assert (tmp_path / "rehearsal.html").exists()
