"""The changes shown on pages are the differences between the scripts before and after."""

import pytest
from docs.test_pages import DOCS, ROOT, blocks_of, is_part_of, texts

LOOPS = texts(blocks_of(DOCS / "guides" / "your-loop.md"), "diff")
HUGGING_FACE, _ = texts(blocks_of(DOCS / "guides" / "hugging-face.md"), "diff")
NAMES = ("torchrun", "accelerate", "lightning", "hugging_face")


@pytest.mark.parametrize(
    ("diff", "name"), list(zip([*LOOPS, HUGGING_FACE], NAMES, strict=True)), ids=NAMES
)
def test_the_lines_of_a_change_are_those_of_the_scripts(diff: str, name: str) -> None:
    for file, mark in ((f"loop_{name}_before.py", "-"), (f"loop_{name}.py", "+")):
        script = (ROOT / "examples" / file).read_text(encoding="utf-8")
        lines = [line[1:] for line in diff.splitlines() if line[0] in (" ", mark)]
        assert len(lines) > 3
        assert is_part_of("\n".join(lines), script), file
