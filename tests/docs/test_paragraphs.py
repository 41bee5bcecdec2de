"""No paragraph of the documentation is longer than 120 words."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG"))]
)
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
ENTRY = re.compile(r"(?:[-*+]|\d+\.|:) +")
MOST_WORDS = 120


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs and entries of lists; code, tables, headings and comments are none."""
    lines: list[str] = []
    for line in [*COMMENT.sub("", FENCE.sub("\n", page)).splitlines(), ""]:
        text = line.strip()
        is_prose = bool(text) and not text.startswith(("|", "#"))
        starts_anew = not is_prose or (ENTRY.match(text) is not None)
        if starts_anew and lines:
            yield " ".join(lines)
            lines = []
        if is_prose:
            lines.append(text)


def too_long(page: str) -> list[str]:
    return [
        f"{len(text.split())} words: {text[:60]}"
        for text in paragraphs(page)
        if len(text.split()) > MOST_WORDS
    ]


def test_no_paragraph_is_longer_than_120_words() -> None:
    found = {page.name: too_long(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {name: long for name, long in found.items() if long} == {}


def test_a_long_paragraph_is_found_in_text_and_in_a_list() -> None:
    long = "word " * 60 + "\n" + "word " * 61
    assert too_long(f"# Title\n\n{long}\n") != []
    assert too_long(f"- short\n- {long}\n  and more\n- short\n") != []


def test_code_tables_and_several_short_paragraphs_are_not_long() -> None:
    words = "word " * 100
    assert too_long(f"{words}\n\n{words}\n") == []
    assert too_long(f"- {words}\n- {words}\n1. {words}\n") == []
    assert too_long(f"```text\n{words}\n{words}\n```\n") == []
    assert too_long(f"{words}\n\n| {words} | {words} |\n") == []
