"""Write a timeline as a file for a browser, a terminal or Perfetto, by its extension."""

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import BadInput
from penstock.files import write_text
from penstock.report.gantt_text import gantt
from penstock.report.perfetto import write_trace
from penstock.report.timelines_html import TimelinePanel, timelines_page
from penstock.text import counted, percent_text, seconds_text
from penstock.timeline.device_rows import gantt_rows
from penstock.timeline.metrics import bubble_fraction, iteration_s, working_devices
from penstock.timeline.plot import PICTURES, check_matplotlib, plot_timeline, write_picture
from penstock.timeline.timeline import Timeline

FORMATS: dict[str, str] = {
    **dict.fromkeys(PICTURES, "picture"),
    ".html": "page to zoom in",
    ".json": "trace for ui.perfetto.dev",
    ".txt": "chart of characters",
}
"""Every extension that `write_timeline` accepts, and what it writes."""

TEXT_WIDTH = 160
"""Columns of a chart of characters."""


def check_timeline_path(path: str | Path) -> str:
    """The extension of ``path``; raises before any work is done."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        known = ", ".join(f"{ending} ({what})" for ending, what in FORMATS.items())
        found = f"ends in '{suffix}'" if suffix else "has no ending"
        raise BadInput(f"picture '{path}' {found}; name it one of {known}")
    if suffix in PICTURES:
        check_matplotlib()
    return suffix


def write_timeline(
    path: str | Path,
    timeline: Timeline,
    cluster_name: str = "",
    memory_limits: Sequence[float] = (),
    title: str = "",
) -> None:
    """Write ``timeline`` to ``path`` in the format of its extension, one of `FORMATS`.

    ``memory_limits`` are the bytes of each device of the cluster, lines on the memory curves
    of a page (missing, 0 or infinite: no line). ``title`` defaults to the timeline's own title.

    Raises:
        BadInput: an unknown extension, or the file cannot be written.
    """
    suffix = check_timeline_path(path)
    title = title or timeline.title or "Timeline"
    where = f" of {cluster_name}" if cluster_name else ""
    note = (
        f"{counted(len(working_devices(timeline)), 'device')}{where}, "
        f"{seconds_text(iteration_s(timeline))}, bubble {percent_text(bubble_fraction(timeline))}"
    )
    match suffix:
        case ".json":
            write_trace([timeline], path)
        case ".txt":
            head = f"{title}: {note}\n"
            write_text(path, head + gantt(timeline, TEXT_WIDTH, colour=False) + "\n")
        case ".html":
            panel = TimelinePanel(gantt_rows(timeline, memory_limits))
            write_text(path, timelines_page((panel,), title, note))
        case _:
            write_picture(plot_timeline(timeline, title=f"{title}\n{note}"), path)
