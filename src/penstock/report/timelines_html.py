"""Timelines as an interactive part of a page, one above the other; `timelines.js` draws them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

from penstock.files import Json
from penstock.text import seconds_text
from penstock.timeline.device_rows import DeviceRow, DrawnEvent, GanttRows, gantt_rows, stage_names
from penstock.timeline.palette import (
    DARK,
    KIND_WORDS,
    LIGHT,
    THEMES,
    Style,
    fill_of,
    ink_on,
    legend_entries,
)
from penstock.timeline.timeline import Timeline


@dataclass(frozen=True)
class TimelinePanel:
    """One of the timelines, with words above it if it has a title."""

    chart: GanttRows
    title: str = ""
    note: str = ""


def timeline_panel(
    title: str, note: str, timeline: Timeline, memory_limits: Sequence[float] = ()
) -> TimelinePanel:
    """The panel of a timeline, with its seconds behind the title."""
    chart = gantt_rows(timeline, memory_limits)
    return TimelinePanel(chart, f"{title}: {seconds_text(chart.end_s)}", note)


def timelines_html(
    panels: Sequence[TimelinePanel], label: str, with_memory: bool, fills_window: bool
) -> str:
    """The controls, the legend and the place of the picture, which ``label`` describes.

    ``with_memory`` says whether memory is shown from the start. On a page that is longer than the
    window, the wheel zooms with Ctrl only.
    """
    return Template(asset("timelines.html")).substitute(
        label=escape(label),
        legend=legend(panels),
        memory="checked" if with_memory else "",
        wheel="" if fills_window else " with Ctrl",
    )


def timelines_data(panels: Sequence[TimelinePanel]) -> dict[str, Json]:
    """The data that the script draws."""
    found = legend_entries(style for panel in panels for style in panel.chart.styles)
    styles = [style for _, own in found for style in own]
    number = {style: index for index, style in enumerate(styles)}
    return {
        "timelines": [
            {
                "title": panel.title,
                "note": panel.note,
                "end_s": panel.chart.end_s,
                "rows": [row_data(row, number) for row in panel.chart.rows],
            }
            for panel in panels
        ],
        "kinds": [style.kind for style in styles],
        "words": {**KIND_WORDS},
        # Colours of the parts of a theme, of each style, and of the text on each style.
        "themes": {
            name: {**theme.inks, "fills": [*fills], "inks": [ink_on(fill) for fill in fills]}
            for name, theme in THEMES.items()
            for fills in [[fill_of(style, theme) for style in styles]]
        },
    }


def row_data(row: DeviceRow, number: dict[Style, int]) -> dict[str, Json]:
    """The data of a device with its lanes."""
    return {
        "device": row.device,
        "stages": stage_names(row.stages, most=20),
        "limit_bytes": row.limit_bytes,
        "compute": [lane_data(lane, number) for lane in row.compute],
        "messages": [lane_data(lane, number, peers=True) for lane in (row.sends, row.receives)],
        "memory": [[nine_digits(time_s), nine_digits(size)] for time_s, size in row.memory],
    }


def lane_data(
    blocks: Iterable[DrawnEvent], number: dict[Style, int], peers: bool = False
) -> dict[str, Json]:
    """The blocks of a lane in the order of their starts, as one list for each of their values."""
    ordered = sorted(blocks, key=lambda block: block.event.start_s)
    events = [block.event for block in ordered]
    return {
        "style": [number[block.style] for block in ordered],
        "stage": [event.stage for event in events],
        "micro_batch": [event.micro_batch for event in events],
        "start_s": [nine_digits(event.start_s) for event in events],
        "end_s": [nine_digits(event.end_s) for event in events],
        "peer": [event.peer for event in events if peers],
        "bytes": [nine_digits(event.bytes) for event in events if peers],
    }


def nine_digits(value: float) -> float:
    """A number with nine digits, which keeps the page small."""
    return float(f"{value:.9g}")


def legend(panels: Sequence[TimelinePanel]) -> str:
    """The colours of the kinds that occur, and what their shades mean."""
    lines: list[str] = []
    for words, styles in legend_entries(style for panel in panels for style in panel.chart.styles):
        fills = [[fill_of(style, THEMES[name]) for name in ("light", "dark")] for style in styles]
        swatches = "".join(
            f'<span class="swatch" style="background:light-dark({light},{dark})"></span>'
            for light, dark in fills
        )
        lines.append(f"<li>{swatches}{words}</li>")
    shades = max((panel.chart for panel in panels), key=lambda chart: chart.shades).shade_words
    return "\n".join([*lines, *([f"<li>{shades}</li>"] if shades else [])])


def timelines_page(panels: Sequence[TimelinePanel], title: str, note: str = "") -> str:
    """The page of timelines, one above the other; they fill the window."""
    label = f"{title}: {note}" if note else title
    body = (
        f'<main class="gantt">\n<header>\n  <h1>{escape(title)}</h1>\n'
        f'  <p class="facts">{escape(note)}</p>\n</header>\n'
        f"{timelines_html(panels, label, with_memory=len(panels) == 1, fills_window=True)}</main>"
    )
    return html_page(title, body, timelines_data(panels))


def table_element(
    names: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]
) -> str:
    """A table with these heads, at the left of names and the right of numbers; cells are HTML.

    On a narrow screen each row becomes lines, of a head and its cell.
    """
    heads = [(head, "") for head in names] + [(head, ' class="number"') for head in numbers]
    top = "".join(f"<th{kind}>{head}</th>" for head, kind in heads)
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td{kind} data-head="{head}">{cell}</td>'
            for (head, kind), cell in zip(heads, cells, strict=True)
        )
        + "</tr>"
        for cells in rows
    )
    shown = f"<thead><tr>{top}</tr></thead>" if any(names) else ""
    return f"<table>{shown}<tbody>\n{body}\n</tbody></table>"


def html_page(title: str, body: str, data: Mapping[str, Json], *scripts: str) -> str:
    """A page that opens without a network, with `timelines_data` and what more ``scripts`` read.

    These are names of assets.
    """
    return Template(asset("page.html")).substitute(
        title=escape(title),
        style=shared_colours() + asset("page.css") + asset("timelines.css"),
        body=body,
        data=embedded_json(data),
        script="\n".join(map(asset, ("drawing.js", "timelines.js", *scripts))),
    )


def shared_colours() -> str:
    """The colours that pages share with pictures, as variables of a style sheet."""
    light, dark = (
        {"F": theme.kinds["F"], "B": theme.kinds["B"], "limit": theme.inks["limit"]}
        for theme in (LIGHT, DARK)
    )
    variables = (f"--{name}: light-dark({light[name]}, {dark[name]});" for name in light)
    return f":root {{ {' '.join(variables)} }}\n"


def asset(name: str) -> str:
    """The content of a file in the package's ``assets``."""
    return (files("penstock.report") / "assets" / name).read_text(encoding="utf-8")


def embedded_json(value: object) -> str:
    """JSON that cannot end the script element that contains it, whatever its strings are.

    >>> embedded_json({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
