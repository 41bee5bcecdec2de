"""Pictures by matplotlib: timelines as Gantt charts, times of iterations as bars; and their files.

matplotlib is imported when something is drawn. Nothing here uses pyplot, so that a notebook's or
script's own figures and backend stay as they are.
"""
# matplotlib's stubs leave keyword arguments without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import BadInput
from penstock.files import write_pieces
from penstock.text import seconds_text, size_text
from penstock.timeline.device_rows import DeviceRow, DrawnEvent, gantt_rows, stage_names
from penstock.timeline.palette import LIGHT, Style, fill_of, ink_on, legend_entries
from penstock.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = (".svg", ".pdf", ".png")
"""The endings of the files that matplotlib writes here."""

BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncols": 9}
"""The position of legends."""

FAR = 2.6
"""Times of more than this many times the shortest are too long for one axis."""

MOST_INCHES, MOST_NAMES, FEW_BLOCKS = 24.0, 64, 4000
"""The height of a figure, the names at its side, and the blocks in it that stay vectors."""

LANE, MEMORY, GAP = 0.22, 0.5, 0.3
"""Heights of a lane of messages, of a memory curve and of the gap below, if computing has 1."""


def has_matplotlib() -> bool:
    """Return whether the extra ``plot`` is installed."""
    return find_spec("matplotlib") is not None


def check_matplotlib() -> None:
    """Raise `BadInput` that says what to install, unless matplotlib is there."""
    if not has_matplotlib():
        raise BadInput("this picture needs matplotlib; pip install 'penstock[plot]'")


def write_picture(ax: "Axes", path: str | Path) -> None:
    """Write the figure of ``ax`` in the format of the ending, one of `PICTURES`."""
    write_pieces(path, (picture(ax, Path(path).suffix.lower()),))


def picture(ax: "Axes", ending: str) -> bytes:
    """The content of a file with the figure of ``ax``, the same for the same figure."""
    from matplotlib import rc_context

    out, dates = BytesIO(), {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": "penstock", "svg.fonttype": "none"}):
        figure: Any = ax.get_figure(root=True)
        figure.savefig(out, format=ending[1:], dpi=150, metadata=dates.get(ending))
    return out.getvalue()


def svg_element(ax: "Axes") -> str:
    """The figure of ``ax`` for a page, which a notebook shows."""
    _, tag, drawn = picture(ax, ".svg").decode().partition("<svg")
    return tag + drawn


def axes_for_times(ax: "Axes | None", end_s: float, width: float, height: float) -> "Axes":
    """``ax``, or those of a new figure of this size in inches, with times from 0 to ``end_s``."""
    check_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    ax = ax or Figure((width, height), layout="constrained").add_subplot()
    ax.set_xlim(0.0, end_s or 1.0)
    ax.xaxis.set_major_formatter(EngFormatter("s"))
    ax.grid(axis="x", color=LIGHT.inks["grid"])
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def plot_bars(
    names: Sequence[str],
    times_s: Sequence[float],
    busy: Sequence[float],
    bound_s: float,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw bars of times, the first on top, of which the part ``busy`` is dark.

    Times far above the shortest are cut off. A dashed line is at the bound.
    """
    longest_s = 1.12 * max(time_s for time_s in times_s if time_s <= FAR * min(times_s))
    ax = axes_for_times(ax, 1.5 * longest_s, 9.0, 1.4 + 0.34 * len(times_s))
    shown, places = [min(time_s, longest_s) for time_s in times_s], range(len(names))
    dark = [min(part * time_s, longest_s) for part, time_s in zip(busy, times_s, strict=True)]
    ax.barh(places, shown, color=LIGHT.inks["area"], label="bubble")
    ax.barh(places, dark, color=LIGHT.kinds["F"], label="computing")
    bound = f"no plan takes less than {seconds_text(bound_s)}"
    ax.axvline(bound_s, color=LIGHT.inks["limit"], linestyle="--", label=bound)
    for place, time_s in enumerate(times_s):
        words = f"  {seconds_text(time_s)}{'' if time_s == shown[place] else ' (cut off)'}"
        words += f", {time_s / bound_s:.2f}x the bound" if bound_s else ""
        ax.text(shown[place], place, words, va="center", fontsize=8)
    ax.set_yticks(places, names)
    ax.invert_yaxis()
    ax.legend(borderaxespad=2.8, frameon=False, **BELOW)
    return ax


def plot_timeline(timeline: Timeline, ax: "Axes | None" = None, title: str = "") -> "Axes":
    """Draw a row for each device on ``ax``, or on a new figure; returns the axes.

    What a device computes has the number of its micro-batch where there is room. Below are the
    messages that it sends and the gradients that it reduces, what it receives, and its memory.
    """
    chart = gantt_rows(timeline)
    lane = LANE if any(row.sends or row.receives for row in chart.rows) else 0.0
    peak_bytes = max((row.peak_bytes for row in chart.rows), default=0.0)
    pitch = 1.0 + 2 * lane + (MEMORY if peak_bytes else 0.0) + GAP
    height = min(1.4 + 0.32 * pitch * len(chart.rows), MOST_INCHES)
    ax = axes_for_times(ax, chart.end_s, 11.0, height)
    ax.set_ylim(max(len(chart.rows), 1) * pitch, -GAP)
    is_large = sum(len(lane) for row in chart.rows for lane in row.lanes) > FEW_BLOCKS
    for number, row in enumerate(chart.rows):
        top, height = number * pitch, 1.0 / len(row.compute)
        for index, blocks in enumerate(row.compute):
            draw_lane(ax, blocks, top + index * height, height, is_large)
            draw_numbers(ax, blocks, top + (index + 0.5) * height)
        draw_lane(ax, row.sends, top + 1.0, lane, is_large)
        draw_lane(ax, row.receives, top + 1.0 + lane, lane, is_large)
        if row.memory:
            draw_memory(ax, row, chart.end_s, top + pitch - GAP, 0.8 * MEMORY / (peak_bytes or 1.0))
    names = [f"device {row.device}  {stage_names(row.stages)}".strip() for row in chart.rows]
    every = ceil((len(names) or 1) / MOST_NAMES)
    ax.set_yticks([i * pitch + 0.5 for i in range(len(names))][::every], names[::every])
    ax.set_title(title or timeline.title, loc="left")
    from matplotlib.patches import Patch

    legend = legend_entries(chart.styles)
    patches = [Patch(color=fill_of(styles[0], LIGHT), label=words) for words, styles in legend]
    ax.legend(handles=patches, title=chart.shade_words, borderaxespad=2.8, frameon=False, **BELOW)
    return ax


def draw_lane(
    ax: "Axes", blocks: Sequence[DrawnEvent], top: float, height: float, is_large: bool
) -> None:
    """Draw blocks as one collection of bars for each style."""
    spans: dict[Style, list[tuple[float, float]]] = defaultdict(list)
    for block in blocks:
        event = block.event
        spans[block.style].append((event.start_s, event.end_s - event.start_s))
    for style, bars in spans.items():
        drawn = ax.broken_barh(bars, (top, height), facecolor=fill_of(style, LIGHT))
        drawn.set(edgecolor="white", linewidth=0.0 if is_large else 0.4, rasterized=is_large)


def draw_numbers(ax: "Axes", blocks: Sequence[DrawnEvent], middle: float) -> None:
    """Write the micro-batch on each block that is wide enough."""
    pixels_per_s = ax.transData.transform((1.0, 0.0))[0] - ax.transData.transform((0.0, 0.0))[0]
    pixels_of_digit = 0.075 * ax.figure.dpi
    for block in blocks:
        event = block.event
        number, room = event.micro_batch, (event.end_s - event.start_s) * pixels_per_s
        if number >= 0 and room >= pixels_of_digit * len(str(number)):
            text = ax.text((event.start_s + event.end_s) / 2, middle, str(number), fontsize=7)
            text.set(ha="center", va="center_baseline", clip_on=True)
            text.set_color(ink_on(fill_of(block.style, LIGHT)))


def draw_memory(
    ax: "Axes", row: DeviceRow, end_s: float, bottom: float, height_per_byte: float
) -> None:
    """Draw the memory of a device as a stepped area, with its peak behind the row."""
    times = [*(time_s for time_s, _ in row.memory), end_s]
    sizes = [*(size for _, size in row.memory), row.memory[-1][1]]
    tops = [bottom - size * height_per_byte for size in sizes]
    ax.fill_between(times, tops, bottom, step="post", color=LIGHT.inks["area"], linewidth=0)
    peak = size_text(row.peak_bytes)
    ax.text(1.005, bottom, peak, transform=ax.get_yaxis_transform(), fontsize=7)
