"""The report of a run: one HTML file that needs only a browser."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from penstock.document import Json, write_text
from penstock.report import sections
from penstock.report.device_rows import gantt_rows
from penstock.report.html_page import asset, html_page
from penstock.report.perfetto import write_trace
from penstock.report.record import RunRecord, read_run
from penstock.report.timelines_html import (
    TIMELINE_SCRIPTS,
    TimelinePanel,
    timelines_data,
    timelines_html,
)
from penstock.words import seconds_text

__all__ = ["page_html", "write_report"]


def write_report(directory: str | Path, out: str | Path | None = None) -> Path:
    """Write ``report.html`` and ``trace.json`` into a run directory; returns the page's path.

    ``out`` is another path for the page.

    Raises:
        BadInput: the directory does not hold a complete run, or cannot be written to.
    """
    record = read_run(directory)
    page = Path(out) if out else record.directory / "report.html"
    write_text(page, page_html(record))
    write_trace((record.predicted, record.measured), record.directory / "trace.json")
    return page


def page_html(record: RunRecord) -> str:
    """The page of a run."""
    panels = timeline_panels(record)
    label = "Predicted timeline above measured timeline, one row for each device"
    body = Template(asset("report.html")).substitute(
        title=escape(record.summary.job),
        facts=sections.facts(record),
        tiles=sections.tiles(record),
        timelines=timelines_html(panels, label, with_memory=False, fills_window=False),
        plan_note=sections.plan_note(record),
        plan_table=sections.plan_table(record),
        time_table=sections.time_table(record),
        length_section=sections.length_section(record) + sections.drift_section(record),
        memory_note="parameters, gradients, optimizer state, saved activations, workspace",
        memory_legend=sections.memory_legend(record),
        loss_legend=sections.loss_legend(record),
        memory_charts=sections.memory_charts(record),
        loss_note=f"{record.summary.steps} steps of {record.plan.global_batch} samples",
        footer=(
            f"Run directory <code>{escape(str(record.directory))}</code>. The same timelines for "
            f"<code>ui.perfetto.dev</code>: <code>trace.json</code>. Rebuild this page with "
            f"<code>penstock report {escape(str(record.directory))}</code>."
        ),
    )
    style = asset("page.css") + asset("timelines.css")
    data = timelines_data(panels) | chart_data(record)
    return html_page(record.summary.job, body, style, (*TIMELINE_SCRIPTS, "charts.js"), data)


def timeline_panels(record: RunRecord) -> Sequence[TimelinePanel]:
    """The predicted timeline with its memory, and below it the measured one."""
    limits = [device.memory_bytes for device in record.cluster.devices]
    panels: list[TimelinePanel] = []
    for title, note, timeline in (
        ("Predicted", "simulated before the run", record.predicted),
        ("Measured", "a step of about the median time", record.measured),
    ):
        chart = gantt_rows(timeline, limits)
        panels.append(TimelinePanel(chart, f"{title}: {seconds_text(chart.end_s)}", note))
    return panels


def chart_data(record: RunRecord) -> dict[str, Json]:
    """The measured peaks of the devices, their memory limits where drawn, and the curves."""
    return {
        "devices": [
            {
                "device": device,
                "limit_bytes": record.near_limits.get(device, 0.0),
                "measured_peak_bytes": record.measured_peaks.get(device, 0.0),
            }
            for device in record.plan.ranks
        ],
        "training": [[row.step, row.loss] for row in record.steps],
        "evaluations": [[row.step, row.evaluation_loss] for row in record.evaluations],
        "samples_per_s": [[row.step, row.samples_per_s] for row in record.steps],
    }
