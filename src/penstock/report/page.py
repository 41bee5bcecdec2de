"""The report of a run: one HTML file that needs only a browser."""

from collections.abc import Iterable, Sequence
from html import escape
from math import inf
from pathlib import Path
from string import Template

from penstock.document import Json, write_text
from penstock.plan.in_words import plan_words
from penstock.plan.plan import Stage
from penstock.plan.throughput import throughput_of
from penstock.report.device_rows import gantt_rows
from penstock.report.perfetto import write_trace
from penstock.report.record import LengthRecord, RunRecord, read_run
from penstock.report.tables import recompute_text
from penstock.report.timelines_html import (
    TIMELINE_SCRIPTS,
    TimelinePanel,
    asset,
    html_page,
    timelines_data,
    timelines_html,
)
from penstock.timeline.metrics import (
    bubble_fraction,
    busy_s,
    covered_s,
    iteration_s,
    peak_memory_bytes,
)
from penstock.timeline.timeline import Timeline
from penstock.words import counted, layers_text, percent_text, seconds_text, size_text

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
        facts=facts(record),
        tiles=tiles(record),
        timelines=timelines_html(panels, label, with_memory=False, fills_window=False),
        plan_note=plan_note(record),
        plan_table=plan_table(record),
        time_table=time_table(record),
        length_section=length_section(record) + drift_section(record),
        memory_note="parameters, gradients, optimizer state, saved activations, workspace",
        memory_legend=memory_legend(record),
        loss_legend=loss_legend(record),
        memory_charts=memory_charts(record),
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


CLOSE_ENOUGH = 0.15
"""A prediction within this relative error is shown as good."""


def facts(record: RunRecord) -> str:
    """The line under the title: what ran, and how it was planned."""
    plan = record.plan
    parts = [
        f"<b>{escape(plan_words(plan, 'worker'))}</b>",
        f"planner <b>{escape(plan.planner)}</b>",
        f"schedule <b>{escape(plan.schedule)}</b>",
        counted(record.summary.workers, "worker"),
        counted(record.summary.steps, "step"),
    ]
    if record.verified:
        parts.append(f"the first step: {escape(record.verified)}")
    return " · ".join([*parts, *map(escape, record.profile.notes)])


def tiles(record: RunRecord) -> str:
    """The headline numbers."""
    summary, error = record.summary, record.error
    of_one = 1 / summary.samples_per_s if summary.samples_per_s else inf
    rates = throughput_of(record.profile, record.cluster, record.plan.ranks, 1, of_one)
    side = "slower" if error < 0 else "faster"
    verdict = "good" if abs(error) <= CLOSE_ENOUGH else "warn"
    evaluation = (
        f"{record.evaluations[-1].evaluation_loss:.3f} on held-out data"
        if record.evaluations
        else "no evaluation"
    )
    return "\n".join(
        [
            tile("Predicted iteration", seconds_text(summary.predicted_s), "by the simulator"),
            tile(
                "Measured iteration",
                seconds_text(summary.measured_s),
                "mean over the lengths" if summary.by_length else "median of the steps",
            ),
            tile(
                "Prediction error",
                percent_text(abs(error)),
                "; ".join(filter(None, (f"the run was {side} than predicted", summary.busy))),
                verdict,
            ),
            tile(
                "Bubble, measured",
                percent_text(bubble_fraction(record.measured)),
                f"predicted {percent_text(bubble_fraction(record.predicted))}",
            ),
            tile(
                "Throughput",
                f"{summary.samples_per_s:.1f}",
                ", ".join(["samples per second", *rates.more_words]),
            ),
            tile("Training loss", f"{summary.loss:.3f}", evaluation),
        ]
    )


def tile(name: str, value: str, more: str, verdict: str = "") -> str:
    """One headline number."""
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="value {verdict}">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def plan_note(record: RunRecord) -> str:
    """A summary of the plan in one sentence."""
    stages, devices = len(record.plan.stages), len(record.plan.ranks)
    return (
        f"{counted(len(record.profile.layers), 'layer')} in {counted(stages, 'stage')} "
        f"on {counted(devices, 'device')} of {escape(record.cluster.name)}"
    )


def plan_table(record: RunRecord) -> str:
    """One row for each stage; its replicas have one line each where they differ."""
    heads = [
        ("Stage", ""),
        ("Layers", "layers"),
        ("Device", "nowrap"),
        ("Samples", "number"),
        ("Recompute", ""),
        ("Parameters", "number"),
        ("Peak memory predicted", "number"),
        ("Peak memory measured", "number"),
        ("Memory limit", "number"),
    ]
    rows = [plan_row(record, index, stage) for index, stage in enumerate(record.plan.stages)]
    return table(heads, rows)


def plan_row(record: RunRecord, index: int, stage: Stage) -> list[str]:
    """The cells of a stage, with its copy if the schedule has one."""
    predicted, measured = peak_memory_bytes(record.predicted), record.measured_peaks
    homes = {record.plan.holder(index, micro_batch): None for micro_batch in (0, 1)}
    held = [device for home in homes for device in home.devices]
    numbers = [rank for device in held for rank in record.plan.ranks_of(device)]
    devices = [record.cluster.devices[number] for number in numbers]
    return [
        str(index),
        layers_cell([record.profile.layers[i].name for i in stage.layers]),
        lines(f"{number} ({device.kind})" for number, device in zip(numbers, devices, strict=True)),
        lines(
            str(rows)
            for home in homes
            for device, rows in zip(home.devices, home.slices, strict=True)
            for _ in record.plan.ranks_of(device)
        ),
        recompute_text(stage),
        size_text(record.profile.parameter_bytes(stage.layers)),
        lines(size_text(predicted[number]) for number in numbers),
        lines(
            size_text(measured[number]) if number in measured else "not measured"
            for number in numbers
        ),
        lines(size_text(device.memory_bytes) for device in devices),
    ]


def layers_cell(names: list[str]) -> str:
    """The names of the first and last layer, and a list of all layers that can be unfolded."""
    short = f"<code>{escape(layers_text(names))}</code>"
    if len(names) <= 2:
        return short
    items = "".join(f"<li><code>{escape(name)}</code></li>" for name in names)
    return f"{short}<details><summary>{len(names)} layers</summary><ol>{items}</ol></details>"


def time_table(record: RunRecord) -> str:
    """Predicted and measured time of each device, divided into busy, communication and idle."""
    heads = [("Device", ""), ("Stage", ""), ("Predicted", ""), ("Measured", "")]
    plan = record.plan
    holders = [plan.devices_of(stage) for stage in range(len(plan.stages))]
    rows = [
        [
            str(rank),
            ", ".join(
                str(s) for s, devices in enumerate(holders) if plan.device_of(rank) in devices
            ),
            split_cell(record.predicted, rank),
            split_cell(record.measured, rank),
        ]
        for rank in plan.ranks
    ]
    return table(heads, rows)


def split_cell(timeline: Timeline, device: int) -> str:
    """Busy, exposed communication and idle shares of a device, as a bar and as numbers."""
    whole_s = iteration_s(timeline) or 1.0
    busy = busy_s(timeline, device) / whole_s
    occupied = covered_s(e for e in timeline.events if e.device == device) / whole_s
    shares = {"busy": busy, "communication": occupied - busy, "idle": 1.0 - occupied}
    bars = "".join(
        f'<i style="width:{share * 100:.2f}%;background:var(--{name})"></i>'
        for name, share in shares.items()
    )
    words = " · ".join(
        f"<span>{name} {percent_text(share)}</span>" for name, share in shares.items()
    )
    return f'<div class="split">{bars}</div><div class="quiet shares">{words}</div>'


def length_section(record: RunRecord) -> str:
    """Predicted and measured iterations for each length; empty if there is only one."""
    if not record.summary.by_length:
        return ""
    heads = [
        ("Length", ""),
        ("Share of the batches", "number"),
        ("Predicted", "number"),
        ("Measured", "number"),
        ("Prediction error", "number"),
        ("Steps", "number"),
    ]
    rows = [length_row(found) for found in record.summary.by_length]
    return (
        '<section>\n  <div class="head"><h2>Lengths of the batches</h2>'
        "<p>Each step counts at the nearest of the lengths that were measured before.</p></div>\n"
        f'  <div class="wide">\n{table(heads, rows)}\n  </div>\n</section>'
    )


def drift_section(record: RunRecord) -> str:
    """The ranks and links that were slower than planned; empty if there were none."""
    if not record.summary.drift:
        return ""
    found = "".join(f"<li>{escape(text)}</li>" for text in record.summary.drift)
    return (
        '<section>\n  <div class="head"><h2>Slower than planned</h2>'
        "<p>What was steadily slow at the end of the run, and what planning again would bring.</p>"
        f"</div>\n  <ul>{found}</ul>\n</section>"
    )


def length_row(found: LengthRecord) -> list[str]:
    """The cells of a length."""
    named = ", ".join(f"{name} {size}" for name, size in found.lengths.items())
    measured, error = "no such step", ""
    if found.steps:
        measured = seconds_text(found.measured_s)
        error = f"{100 * (found.predicted_s / found.measured_s - 1):+.1f} %"
    return [
        escape(named),
        percent_text(found.share),
        seconds_text(found.predicted_s),
        measured,
        error,
        str(found.steps),
    ]


def memory_legend(record: RunRecord) -> str:
    """The legend of the memory charts."""
    known = [("predicted over the iteration", "--F", "")]
    if record.measured_peaks:
        known.append(("measured peak", "--ink", "dashed"))
    if record.near_limits:
        known.append(("limit", "--limit", "dashed"))
    return strokes(known)


def loss_legend(record: RunRecord) -> str:
    """The legend of the loss chart."""
    known = [("training", "--F", "")]
    if record.evaluations:
        known.append(("held-out data", "--B", ""))
    return strokes(known)


def strokes(known: list[tuple[str, str, str]]) -> str:
    """Legend entries from name, colour and style."""
    return "\n".join(
        f'<li><span class="swatch stroke {style}" style="color:var({colour})"></span>{name}</li>'
        for name, colour, style in known
    )


def memory_charts(record: RunRecord) -> str:
    """An empty chart for the memory curve of each device, with its peaks in words."""
    predicted, measured = peak_memory_bytes(record.predicted), record.measured_peaks
    parts: list[str] = []
    for device in record.plan.ranks:
        peaks = f"peak {size_text(predicted[device])} predicted"
        if device in measured:
            peaks += f", {size_text(measured[device])} measured"
        limit = size_text(record.cluster.devices[device].memory_bytes)
        parts.append(
            f'<div><h3>Device {device}<span class="quiet">{peaks}; limit {limit}</span></h3>'
            f'<svg class="figure" id="memory-{device}" role="img" '
            f'aria-label="Memory of device {device} over one iteration"></svg></div>'
        )
    return "\n".join(parts)


def table(heads: list[tuple[str, str]], rows: list[list[str]]) -> str:
    """A table; cells are already HTML, and a head gives its column's CSS class."""
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in heads)
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}">{cell}</td>' for cell, (_, kind) in zip(cells, heads, strict=True)
        )
        + "</tr>"
        for cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def lines(texts: Iterable[str]) -> str:
    """Texts on separate lines of a cell."""
    return "<br>".join(escape(text) for text in texts)
