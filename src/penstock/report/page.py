"""The report of a run: one HTML file that needs only a browser."""

from collections import Counter
from collections.abc import Iterable
from html import escape
from math import inf
from pathlib import Path
from string import Template

from penstock.files import Json, write_text
from penstock.plan.plan import Stage, plan_words, recompute_text
from penstock.plan.throughput import rate_words, throughput_of
from penstock.report.perfetto import write_trace
from penstock.report.record import RunRecord, read_run
from penstock.report.timelines_html import (
    asset,
    html_page,
    table_element,
    timeline_panel,
    timelines_data,
    timelines_html,
)
from penstock.text import counted, layers_text, percent_text, seconds_text, size_text
from penstock.timeline.metrics import bubble_fraction, busy_s, covered_s, iteration_s
from penstock.timeline.timeline import Timeline


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
    limits = [device.memory_bytes for device in record.cluster.devices]
    panels = (
        timeline_panel("Predicted", "simulated before the run", record.predicted, limits),
        timeline_panel("Measured", "a step of about the median time", record.measured, limits),
    )
    evaluated = bool(record.evaluations)
    label = "Predicted timeline above measured timeline, one row for each device"
    body = Template(asset("report.html")).substitute(
        title=escape(record.summary.job),
        facts=facts(record),
        tiles=tiles(record),
        timelines=timelines_html(panels, label, with_memory=False, fills_window=False),
        tables="\n".join(
            (
                plan_section(record),
                time_section(record),
                length_section(record),
                tried_section(record),
                drift_section(record),
            )
        ),
        run_table=run_table(record),
        memory_note="parameters, gradients, optimizer state, saved activations, workspace",
        memory_legend=strokes(
            {"predicted over the iteration": "F"}
            | ({"measured peak": "ink dashed"} if record.measured_peaks else {})
            | ({"limit": "limit dashed"} if record.near_limits else {})
        ),
        loss_legend=strokes({"training": "F"} | ({"held-out data": "B"} if evaluated else {})),
        memory_charts=memory_charts(record),
        loss_note=f"{record.summary.steps} steps of {record.plan.global_batch} samples",
        footer=(
            f"Run directory <code>{escape(str(record.directory))}</code>. The same timelines for "
            f"<code>ui.perfetto.dev</code>: <code>trace.json</code>. Rebuild this page with "
            f"<code>penstock report {escape(str(record.directory))}</code>."
        ),
    )
    data = timelines_data(panels) | chart_data(record)
    return html_page(record.summary.job, body, data, "charts.js")


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
    """The line under the title: what ran."""
    parts = [counted(record.summary.workers, "worker"), counted(record.summary.steps, "step")]
    return " · ".join([f"<b>{escape(plan_words(record.plan, 'worker'))}</b>", *parts])


def run_table(record: RunRecord) -> str:
    """A table of how the run was planned and checked, where, when and with what it ran."""
    plan, ran = record.plan, record.summary.circumstances
    kinds = Counter(record.cluster.devices[rank].kind for rank in plan.ranks)
    rows = [["Plan", f"by planner {plan.planner}, schedule {plan.schedule}"]]
    rows += [["First step", record.verified]] if record.verified else []
    rows.append(["Devices", ", ".join(f"{count} x {kind}" for kind, count in kinds.items())])
    if ran:
        size = f"{counted(ran.cores, 'core')}, {size_text(ran.memory_bytes)}"
        others = f", first of {ran.hosts} hosts" if ran.hosts > 1 else ""
        load = f"{ran.load_before:.1f} before, {ran.load_during:.1f} at the end"
        rows += [
            ["Machine", f"{ran.host}{others}: {ran.processor}, {size}"],
            ["Load", f"{load}, on average over a minute"],
            ["Versions", ", ".join(f"{name} {version}" for name, version in ran.versions.items())],
            *([["Command", ran.command]] if ran.command else []),
            ["Begun", ran.began],
        ]
    rows += [["Measuring", note] for note in record.profile.notes]
    return table_element(("", ""), (), [list(map(escape, row)) for row in rows])


def tiles(record: RunRecord) -> str:
    summary, error = record.summary, record.error
    of_one = 1 / summary.samples_per_s if summary.samples_per_s else inf
    rates = throughput_of(record.profile, record.cluster, record.plan.ranks, 1, of_one)
    rate, unit, others = rates.samples_per_s, "samples", rates.more_words
    if rates.tokens_per_s:
        others = [f"{rate_words(rate)} samples per second", *others[1:]]
        rate, unit = rates.tokens_per_s, "tokens"
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
                rate_words(rate),
                ", ".join([f"{unit} per second", *others]),
            ),
            tile("Training loss", f"{summary.loss:.3f}", evaluation),
        ]
    )


def tile(name: str, value: str, more: str, verdict: str = "") -> str:
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="value {verdict}">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def plan_section(record: RunRecord) -> str:
    """One row for each stage; its replicas have one line each where they differ."""
    names = ("Stage", "Layers", "Device", "Recompute")
    numbers = ("Samples", "Parameters", "Peak memory predicted", "Peak memory measured")
    rows = [plan_row(record, index, stage) for index, stage in enumerate(record.plan.stages)]
    note = (
        f"{counted(len(record.profile.layers), 'layer')} in {counted(len(rows), 'stage')} on "
        f"{counted(len(record.plan.ranks), 'device')} of {escape(record.cluster.name)}"
    )
    return section("The plan", note, table_element(names, (*numbers, "Memory limit"), rows))


def plan_row(record: RunRecord, index: int, stage: Stage) -> list[str]:
    """The cells of a stage, with its copy if the schedule has one."""
    plan, predicted, measured = record.plan, record.predicted_peaks, record.measured_peaks
    homes = {plan.holder(index, micro_batch): None for micro_batch in (0, 1)}
    held = [pair for home in homes for pair in zip(home.devices, home.slices, strict=True)]
    ranks = [(rank, rows) for device, rows in held for rank in plan.ranks_of(device)]
    numbers = [rank for rank, _ in ranks]
    devices = [record.cluster.devices[number] for number in numbers]
    return [
        str(index),
        layers_cell([record.profile.layers[i].name for i in stage.layers]),
        lines(f"{number} ({device.kind})" for number, device in zip(numbers, devices, strict=True)),
        recompute_text(stage),
        lines(str(rows) for _, rows in ranks),
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


def time_section(record: RunRecord) -> str:
    """Predicted and measured time of each device, divided into busy, communication and idle."""
    plan = record.plan
    holders = [plan.devices_of(stage) for stage in range(len(plan.stages))]
    rows: list[list[str]] = []
    for rank in plan.ranks:
        stages = (str(s) for s, devices in enumerate(holders) if plan.device_of(rank) in devices)
        times = (split_cell(timeline, rank) for timeline in (record.predicted, record.measured))
        rows.append([str(rank), ", ".join(stages), *times])
    note = (
        "Communication counts where nothing is computed meanwhile. With idle time it is the bubble."
    )
    legend = "".join(
        f'<li><span class="swatch" style="background:var(--{name})"></span>{name}</li>'
        for name in ("busy", "communication", "idle")
    )
    table = table_element(("Device", "Stage", "Predicted", "Measured"), (), rows)
    body = f'<ul class="legend">{legend}</ul>\n{table}'
    return section("Where each device's time goes", note, body)


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
    return f'<div class="split">{bars}</div><div class="quiet">{words}</div>'


def length_section(record: RunRecord) -> str:
    """Predicted and measured iterations for each length; empty if there is only one."""
    if not record.summary.by_length:
        return ""
    numbers = ("Share of the batches", "Predicted", "Measured", "Prediction error", "Steps")
    rows: list[list[str]] = []
    for found in record.summary.by_length:
        error = f"{100 * (found.predicted_s / found.measured_s - 1):+.1f} %" if found.steps else ""
        rows.append(
            [
                escape(", ".join(f"{name} {size}" for name, size in found.lengths.items())),
                percent_text(found.share),
                seconds_text(found.predicted_s),
                seconds_text(found.measured_s) if found.steps else "no such step",
                error,
                str(found.steps),
            ]
        )
    note = "Each step counts at the nearest of the lengths that were measured before."
    return section("Lengths of the batches", note, table_element(("Length",), numbers, rows))


def tried_section(record: RunRecord) -> str:
    """The plans that were tried before the run; empty if none were."""
    if not record.summary.tried:
        return ""
    rows = [list(map(escape, found.cells)) for found in record.summary.tried]
    note = "Short trials before the run, the quickest first, with which it went on."
    table = table_element(("Plan",), ("Predicted", "Measured"), rows)
    return section("Plans that were tried", note, table)


def drift_section(record: RunRecord) -> str:
    """The ranks and links that were slower than planned; empty if there were none."""
    if not record.summary.drift:
        return ""
    found = "".join(f"<li>{escape(text)}</li>" for text in record.summary.drift)
    note = "What was steadily slow at the end of the run. Measure and plan again, if it stays so."
    return section("Slower than planned", note, f"<ul>{found}</ul>")


def section(title: str, note: str, body: str) -> str:
    head = f'<div class="head"><h2>{title}</h2><p>{note}</p></div>'
    return f'<section>\n{head}\n<div class="wide">\n{body}\n</div>\n</section>'


def strokes(known: dict[str, str]) -> str:
    """The legend of lines: names, each with its colour and perhaps the class ``dashed``."""
    colours = {name: style.split() for name, style in known.items()}
    return "\n".join(
        f'<li><span class="swatch stroke {" ".join(dashed)}" style="color:var(--{colour})"></span>'
        f"{name}</li>"
        for name, (colour, *dashed) in colours.items()
    )


def memory_charts(record: RunRecord) -> str:
    """An empty chart for the memory curve of each device, with its peaks in words."""
    predicted, measured = record.predicted_peaks, record.measured_peaks
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


def lines(texts: Iterable[str]) -> str:
    """Texts on separate lines of a cell."""
    return "<br>".join(f"<span>{escape(text)}</span>" for text in texts)
