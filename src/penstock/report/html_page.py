"""Pages that need only a browser: style, scripts and data are in the file itself."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

__all__ = ["asset", "embedded_json", "html_page"]


def html_page(
    title: str, body: str, style: str, scripts: Sequence[str] = (), data: object = None
) -> str:
    """A page that opens without a network; ``scripts`` are names of assets, which read ``data``."""
    return Template(asset("page.html")).substitute(
        title=escape(title),
        style=style,
        body=body,
        data=embedded_json(data),
        script="\n".join(map(asset, scripts)),
    )


def asset(name: str) -> str:
    """The content of a file in the package's ``assets``."""
    return (files("penstock.report") / "assets" / name).read_text(encoding="utf-8")


def embedded_json(value: object) -> str:
    """JSON that cannot end the script element that contains it, whatever its strings are.

    >>> embedded_json({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
