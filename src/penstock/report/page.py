"""The report of a run: one HTML file that needs only a browser."""

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from penstock.document import write_text
from penstock.report import sections
from penstock.report.figures import page_figures
from penstock.report.perfetto import write_trace
from penstock.report.record import RunRecord, read_run

__all__ = ["page_html", "write_report"]

SCRIPTS = ("drawing.js", "timelines.js", "charts.js")


def write_report(directory: str | Path, out: str | Path | None = None) -> Path:
    """Write ``report.html`` and ``trace.json`` into a run directory; returns the page's path.

    ``out`` is another path for the page.

    Raises:
        BadInput: the directory does not hold a complete run, or cannot be written to.
    """
    record = read_run(directory)
    write_trace((record.predicted, record.measured), record.directory / "trace.json")
    page = Path(out) if out else record.directory / "report.html"
    write_text(page, page_html(record))
    return page


def page_html(record: RunRecord) -> str:
    """The page with embedded style, script and data, so that it opens without a network."""
    title = record.summary.job
    return Template(asset("page.html")).substitute(
        title=escape(title),
        facts=sections.facts(record),
        tiles=sections.tiles(record),
        legend=sections.legend(record),
        plan_note=sections.plan_note(record),
        plan_table=sections.plan_table(record),
        time_table=sections.time_table(record),
        length_section=sections.length_section(record),
        memory_note="parameters, gradients, optimizer state, saved activations, workspace",
        memory_legend=sections.memory_legend(record),
        loss_legend=sections.loss_legend(record),
        memory_figures=sections.memory_figures(record),
        loss_note=f"{record.summary.steps} steps of {record.plan.global_batch} samples",
        footer=(
            f"Run directory <code>{escape(str(record.directory))}</code>. The same timelines for "
            f"<code>ui.perfetto.dev</code>: <code>trace.json</code>. Rebuild this page with "
            f"<code>penstock report {escape(str(record.directory))}</code>."
        ),
        style=asset("page.css"),
        script="\n".join(asset(name) for name in SCRIPTS),
        data=embedded_json(page_figures(record)),
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
