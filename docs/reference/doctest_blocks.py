"""An extension of mkdocstrings: examples become blocks of code, and parameters tables.

Docstrings hold doctests as paragraphs of their own, without a heading. Markdown takes ``>>>`` for
three nested quotations. They say in prose what parameters mean; a table gives the type and default
of each.
"""

from html import escape
from typing import Any

from griffe import Class, Extension, Function, Object

__all__ = ["DoctestBlocks", "parameter_table", "with_blocks"]


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


def parameter_table(obj: Object) -> str:
    """The parameters of a function or the fields of a class; empty below two."""
    if not isinstance(obj, Class | Function):
        return ""
    given = [
        one
        for one in obj.parameters
        if one.name not in ("self", "cls") and not one.name.startswith("_")
    ]
    if len(given) < 2:
        return ""

    def code(value: object) -> str:
        return f"<code>{escape(str(value)).replace('|', '&#124;')}</code>" if value else ""

    rows = [
        f"| `{one.name}` | {code(one.annotation)} | "
        f"{code(one.default) if one.default is not None else 'needed'} |"
        for one in given
    ]
    return "\n".join(["", "| Parameter | Type | Default |", "|---|---|---|", *rows, ""])


class DoctestBlocks(Extension):
    """Changes the docstring of every object when it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """See griffe."""
        if obj.docstring is not None:
            said, raises, errors = with_blocks(obj.docstring.value).partition("\nRaises:")
            obj.docstring.value = f"{said}\n{parameter_table(obj)}{raises}{errors}"
