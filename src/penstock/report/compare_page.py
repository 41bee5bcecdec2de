"""Writes the picture of a comparison, as an SVG or as an HTML page that contains it."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from penstock.document import write_text
from penstock.errors import BadInput
from penstock.report.compare_picture import ComparedPlan, PictureHead, compare_drawing
from penstock.report.drawing_svg import drawing_svg
from penstock.report.html_page import asset, html_page

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
        paragraphs = "\n".join(f"<p>{escape(text)}</p>" for text in words if text)
        below = f"<section>\n{paragraphs}\n</section>\n" if paragraphs else ""
        body = (
            f'<main class="compare">\n<section class="wide">\n{picture}</section>\n{below}</main>'
        )
        picture = html_page(head.title, body, asset("page.css"))
    write_text(path, picture)
