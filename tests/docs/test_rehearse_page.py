"""The commands of the part on rehearsals run as printed."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "profile-and-plan.md"
_, _, PART = PAGE.read_text(encoding="utf-8").partition("\n## Rehearse a plan\n")
COMMANDS = re.findall(r"^penstock (.+)$", PART, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_guide_run(
    penstock: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planned, rehearsed = (penstock(*shlex.split(command)) for command in COMMANDS)
    assert planned.code == 0, planned.errors
    # On a busy machine the time may differ by more than the tolerance; all else may not.
    assert rehearsed.code == 0 or "of the plan's time" in rehearsed.errors, rehearsed.errors
    assert rehearsed.output.startswith("iteration ")
    assert "16 processes started in" in rehearsed.output
    assert (tmp_path / "rehearsal.html").exists()
