"""An extension of mkdocstrings: examples in docstrings become blocks of code.

Docstrings hold doctests as paragraphs of their own, without a heading. Markdown takes ``>>>`` for
three nested quotations.
"""

from typing import Any

from griffe import Extension, Object

__all__ = ["DoctestBlocks", "with_blocks"]


def with_blocks(text: str) -> str:
    """A docstring whose doctests are fenced; each ends at an empty line."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if not inside and line.lstrip().startswith(">>> "):
            inside = True
            lines.append(f"{indent}```pycon")
        elif inside and not line.strip():
            inside = False
            lines.append(f"{indent_of(lines)}```")
        lines.append(line)
    return "\n".join([*lines, f"{indent_of(lines)}```"] if inside else lines)


def indent_of(lines: list[str]) -> str:
    """The indentation of the last line."""
    return lines[-1][: len(lines[-1]) - len(lines[-1].lstrip())]


class DoctestBlocks(Extension):
    """Changes the docstring of every object when it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """See griffe."""
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(obj.docstring.value)
