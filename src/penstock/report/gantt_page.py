"""Timelines as an interactive page with zoom: one HTML file that needs only a browser."""

from collections.abc import Sequence
from html import escape

from penstock.report.device_rows import GanttRows
from penstock.report.html_page import asset, html_page
from penstock.report.timelines_html import (
    TIMELINE_SCRIPTS,
    TimelinePanel,
    timelines_data,
    timelines_html,
)

__all__ = ["gantt_page", "timelines_page"]


def gantt_page(chart: GanttRows, title: str, note: str = "") -> str:
    """The page of a chart, which fills the window."""
    return timelines_page((TimelinePanel(chart),), title, note)


def timelines_page(panels: Sequence[TimelinePanel], title: str, note: str = "") -> str:
    """The page of timelines, one above the other; they fill the window."""
    label = f"{title}: {note}" if note else title
    body = (
        f'<main class="gantt">\n<header>\n  <h1>{escape(title)}</h1>\n'
        f'  <p class="facts">{escape(note)}</p>\n</header>\n'
        f"{timelines_html(panels, label, with_memory=len(panels) == 1, fills_window=True)}</main>"
    )
    style = asset("page.css") + asset("timelines.css")
    return html_page(title, body, style, TIMELINE_SCRIPTS, timelines_data(panels))
