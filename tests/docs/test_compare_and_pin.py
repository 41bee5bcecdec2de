"""The comparison of the guide runs as printed; `test_pins.py` runs its pins."""

import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "docs" / "guides" / "profile-and-plan.md"
COMMANDS = re.findall(r"^penstock (compare .+)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_command_of_the_guide_draws_its_picture(
    penstock: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = COMMANDS
    answer = penstock(*shlex.split(command))
    assert answer.code == 0, answer.errors
    assert "Why search won: " in answer.output
    drawn, shown = (
        " ".join(node.text for node in ET.parse(place).iter() if node.text)
        for place in (tmp_path / "compare.svg", ROOT / "docs" / "pictures" / "compare.svg")
    )
    for planner in ("search (", "dapple (", "data-parallel ("):
        assert planner in drawn and planner in shown
