"""The commands of the command-line reference run as printed."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "command-line.md"
COMMANDS = re.findall(r"^penstock (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_commands_of_the_reference_run(
    penstock: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = [penstock(*shlex.split(command)) for command in COMMANDS]
    assert [answer.errors for answer in answers if answer.code] == []
    _, gpipe = answers
    assert "schedule gpipe" in gpipe.output
    assert "<svg" in (tmp_path / "gpipe.svg").read_text(encoding="utf-8")
