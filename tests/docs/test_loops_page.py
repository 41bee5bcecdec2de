"""The changes shown on the page are the differences between the scripts before and after."""

import re
from pathlib import Path

import pytest
from docs.test_pages import is_part_of

ROOT = Path(__file__).parents[2]
DIFF = re.compile(r"^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "guides" / "your-loop.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("diff", "name"),
    list(
        zip(DIFF.findall(PAGE), ["loop_torchrun", "loop_accelerate", "loop_lightning"], strict=True)
    ),
    ids=["torchrun", "accelerate", "lightning"],
)
def test_the_lines_of_a_change_are_those_of_the_scripts(diff: str, name: str) -> None:
    for file, mark in ((f"{name}_before.py", "-"), (f"{name}.py", "+")):
        script = (ROOT / "examples" / file).read_text(encoding="utf-8")
        lines = [line[1:] for line in diff.splitlines() if line[0] in (" ", mark)]
        assert len(lines) > 5
        assert is_part_of("\n".join(lines), script), file
