"""A timeline as an interactive page with zoom: one HTML file that needs only a browser."""

from html import escape
from string import Template

from penstock.document import Json
from penstock.report.device_rows import DeviceRow, DrawnEvent, GanttRows
from penstock.report.device_stages import stage_names
from penstock.report.page import asset, embedded_json
from penstock.report.palette import KIND_WORDS, THEMES, Style, Theme, fill_of, ink_on

__all__ = ["gantt_page"]

SCRIPTS = ("drawing.js", "gantt.js")


def gantt_page(chart: GanttRows, title: str, note: str = "") -> str:
    """The page with embedded style, script and data, so that it opens without a network."""
    return Template(asset("gantt.html")).substitute(
        title=escape(title),
        note=escape(note),
        legend=legend(chart),
        colours=colour_rules(chart),
        style="\n".join(asset(name) for name in ("page.css", "gantt.css")),
        script="\n".join(asset(name) for name in SCRIPTS),
        data=embedded_json(page_data(chart)),
    )


def page_data(chart: GanttRows) -> dict[str, Json]:
    """The data that the page's script draws."""
    styles = chart.styles
    number = {style: index for index, style in enumerate(styles)}
    return {
        "end_s": chart.end_s,
        "rows": [row_data(row, number) for row in chart.rows],
        "styles": [style.name for style in styles],
        "themes": {name: theme_data(theme, styles) for name, theme in THEMES.items()},
    }


def row_data(row: DeviceRow, number: dict[Style, int]) -> dict[str, Json]:
    """The data of a device with its lanes."""
    return {
        "device": row.device,
        "stages": stage_names(row.stages),
        "limit_bytes": row.limit_bytes,
        "compute": [lane_data(lane, number) for lane in row.compute],
        "messages": [lane_data(row.sends, number), lane_data(row.receives, number)],
        "memory": [[rounded(time_s), rounded(size)] for time_s, size in row.memory],
    }


def lane_data(blocks: tuple[DrawnEvent, ...], number: dict[Style, int]) -> list[Json]:
    """Blocks as lists in the order of their starts: style, kind, stage and so on."""
    return [
        [
            number[block.style],
            block.event.kind,
            block.event.stage,
            block.event.micro_batch,
            rounded(block.start_s),
            rounded(block.end_s),
            block.event.peer,
            rounded(block.event.bytes),
        ]
        for block in sorted(blocks, key=lambda block: block.start_s)
    ]


def rounded(value: float) -> float:
    """A number with nine digits, which keeps the page small."""
    return float(f"{value:.9g}")


def theme_data(theme: Theme, styles: tuple[Style, ...]) -> dict[str, Json]:
    """The colours of a theme: of its parts, of each style, and of the text on each style."""
    fills = [fill_of(style, theme) for style in styles]
    return {
        "ink": theme.ink,
        "quiet": theme.quiet,
        "grid": theme.grid,
        "row": theme.row,
        "area": theme.area,
        "limit": theme.limit,
        "fills": [*fills],
        "inks": [ink_on(fill) for fill in fills],
    }


def legend(chart: GanttRows) -> str:
    """The colours of the kinds that occur, and what their shades mean."""
    names = {style.name: style.kind for style in sorted(chart.styles, key=lambda s: s.shade)}
    lines: list[str] = []
    for kind, words in KIND_WORDS.items():
        own = [name for name, of in names.items() if of == kind]
        swatches = "".join(f'<span class="swatch style-{name}"></span>' for name in own)
        if own:
            lines.append(f"<li>{swatches}{words}</li>")
    if chart.mirrored:
        lines.append("<li>light: odd micro-batches, the other way round</li>")
    elif chart.shades > 1:
        lines.append(f"<li>dark to light: the {chart.shades} stages of a device</li>")
    return "\n".join(lines)


def colour_rules(chart: GanttRows) -> str:
    """The CSS rules of the legend's swatches."""
    light, dark = (
        [f".style-{s.name} {{ background: {fill_of(s, theme)}; }}" for s in chart.styles]
        for theme in (THEMES["light"], THEMES["dark"])
    )
    return "\n".join([*light, "@media (prefers-color-scheme: dark) {", *dark, "}"])
