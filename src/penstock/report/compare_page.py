"""Writes the picture of a comparison, as an SVG or as an HTML page that contains it."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from penstock.document import write_text
from penstock.errors import BadInput
from penstock.report.compare_picture import ComparedPlan, PictureHead, compare_drawing
from penstock.report.drawing_svg import drawing_svg

__all__ = ["check_picture_path", "write_picture"]

FORMATS = (".svg", ".html")


def check_picture_path(path: str) -> None:
    """Raise for a picture that cannot be written; an empty ``path`` means no picture.

    Raises:
        BadInput: the path ends neither in .svg nor in .html.
    """
    if path and Path(path).suffix not in FORMATS:
        raise BadInput(
            f"picture '{path}' must end in {' or '.join(FORMATS)}; for a bitmap, open the .svg in "
            f"a browser"
        )


def write_picture(
    path: str, plans: Sequence[ComparedPlan], head: PictureHead, words: Sequence[str]
) -> None:
    """Write the picture; on an HTML page the paragraphs ``words`` follow it.

    Raises:
        BadInput: the file cannot be written.
    """
    picture = drawing_svg(compare_drawing(plans, head), "comparison")
    if path.endswith(".html"):
        page = (files("penstock.report") / "assets" / "compare.html").read_text(encoding="utf-8")
        paragraphs = "\n".join(f"<p>{escape(text)}</p>" for text in words if text)
        picture = Template(page).substitute(
            title=escape(head.title), picture=picture, words=paragraphs
        )
    write_text(path, picture)
