"""A timeline as a drawing: a row for each device, its messages below, and memory at the bottom."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from typing import TypeAlias

from penstock.report.device_rows import (
    DeviceRow,
    DrawnEvent,
    GanttRows,
    merged_blocks,
    stage_names,
)
from penstock.report.drawing import Curve, Drawing, Mark, Rule, Run, Slab, Words
from penstock.report.palette import KIND_WORDS, Ink, Style, legend_entries
from penstock.report.time_axis import TimeAxis, axis_marks, grid_marks
from penstock.words import seconds_text, size_text

__all__ = ["LegendEntry", "gantt_drawing", "legend_marks", "row_heights", "rows_panel"]

Panel: TypeAlias = tuple[list[Mark], float]
"""The marks of a panel, and the y at which it ends."""

LegendEntry: TypeAlias = tuple[str, Sequence[Ink | Style]]
"""Words, and the colours that they explain."""

WIDTH, MARGIN, GUTTER = 1360.0, 28.0, 180.0
MOST_ROWS = 64
HIDDEN = 26.0
"""Height of the line that says how many rows are left out, in pixels."""

FEW_BLOCKS = 2500
"""Up to this many blocks, each block has a tooltip."""

NARROWEST_MESSAGE = 2.0
"""Messages of fewer pixels are merged; lanes of messages are low."""


@dataclass(frozen=True, slots=True)
class RowHeights:
    """Heights in pixels: compute, each lane of messages, and the gap below; and the font size."""

    compute: float
    lane: float
    gap: float
    font: float

    @property
    def pitch(self) -> float:
        return self.compute + 2 * self.lane + self.gap


def gantt_drawing(chart: GanttRows, title: str, note: str = "", width: float = WIDTH) -> Drawing:
    """The drawing of a chart; of more than 64 devices the first and last ones are shown."""
    chart = chart.without_middle(MOST_ROWS)
    axis = TimeAxis(GUTTER, width - MARGIN, chart.end_s or 1.0)
    heads: list[Mark] = [Words(title, MARGIN, 38, 20, bold=True)]
    if note:
        heads.append(Words(note, MARGIN, 59, 12.5, "quiet"))
    entries: list[LegendEntry] = [*legend_entries(chart.styles)]
    if chart.shade_words:
        entries.append((chart.shade_words, ()))
    legend, top = legend_marks(entries, MARGIN, axis.right, 84 if note else 66)

    def names(row: DeviceRow) -> tuple[str, str]:
        return f"device {row.device}", stage_names(row.stages)

    heights = row_heights(len(chart.rows), chart.has_transfers)
    rows, bottom = rows_panel(chart, axis, top + 18, heights, names)
    memory, end = memory_marks(chart.rows, axis, bottom + 14) if chart.has_memory else ([], bottom)
    grid = grid_marks(axis, top + 13, end)
    marks = (*heads, *legend, *grid, *rows, *memory, *axis_marks(axis, end))
    return Drawing(width, end + 40, title, marks)


def row_heights(rows: int, has_transfers: bool) -> RowHeights:
    """Heights that decrease with the number of rows."""
    heights = (
        RowHeights(24, 5, 8, 12.5)
        if rows <= 8
        else RowHeights(15, 3, 5, 12)
        if rows <= 16
        else RowHeights(11, 2, 3, 11)
        if rows <= 32
        else RowHeights(7, 2, 2, 10)
    )
    return heights if has_transfers else replace(heights, lane=0.0)


def rows_panel(
    chart: GanttRows,
    axis: TimeAxis,
    top: float,
    heights: RowHeights,
    names: Callable[[DeviceRow], tuple[str, str]],
    few_blocks: int = FEW_BLOCKS,
) -> Panel:
    """The rows of a chart from ``top`` on, until the end of the axis.

    ``names`` are the words at the left of a row: at the margin and beside it. If rows are low, not
    every row has them. Up to ``few_blocks`` blocks have a tooltip each.
    """
    marks: list[Mark] = []
    with_labels = sum(len(lane) for row in chart.rows for lane in row.lanes) <= few_blocks
    y = top
    for index, row in enumerate(chart.rows):
        if index == chart.head:
            marks.append(
                Words(f"... {chart.hidden} more rows ...", axis.left, y + 15, 11.5, "quiet")
            )
            y += HIDDEN
        marks += row_marks(row, axis, y, heights, with_labels)
        if index % ceil((heights.font + 2) / heights.pitch) == 0:
            middle = y + heights.compute / 2 + heights.font * 0.36
            left, right = names(row)
            marks += [Words(left, MARGIN, middle, heights.font)] if left else []
            marks.append(Words(right, axis.left - 10, middle, heights.font - 1, "quiet", "end"))
        y += heights.pitch
    return marks, y - heights.gap


def row_marks(
    row: DeviceRow, axis: TimeAxis, y: float, heights: RowHeights, with_labels: bool
) -> list[Mark]:
    """A device: what it computes, and below it what it sends and receives."""
    marks: list[Mark] = [Slab(axis.left, y, axis.width, heights.compute, "row")]
    height = heights.compute / len(row.compute)
    gap = 1.0 if len(row.compute) > 1 else 0.0
    for index, lane in enumerate(row.compute):
        marks += lane_marks(lane, axis, y + index * height, height - gap, with_labels)
    if heights.lane:
        for index, lane in enumerate((row.sends, row.receives)):
            place = y + heights.compute + 1 + index * heights.lane
            height = heights.lane - (1 if heights.lane > 2 else 0.4)
            marks += lane_marks(lane, axis, place, height, with_labels, NARROWEST_MESSAGE)
    return marks


def lane_marks(
    blocks: Sequence[DrawnEvent],
    axis: TimeAxis,
    y: float,
    height: float,
    with_labels: bool,
    narrowest: float = 1.0,
) -> list[Mark]:
    """The blocks of a lane, with tooltips or merged into runs, and the numbers that fit on them."""
    marks: list[Mark] = []
    digits = len(str(max((block.event.micro_batch for block in blocks), default=0)))
    runs: dict[tuple[Style, float], list[tuple[float, float]]] = defaultdict(list)
    numbers: list[Mark] = []
    for span in merged_blocks(blocks, axis.end_s, axis.left, axis.right, narrowest):
        gap = 0.8 if span.width > 4 else 0.3 if span.width > 2 and span.block else 0.0
        width = span.width - gap
        if with_labels and span.block:
            label = block_label(span.block)
            marks.append(Slab(span.x, y, width, height, span.style, label))
        else:
            runs[span.style, span.strength].append((span.x, width))
        number = span.block.event.micro_batch if span.block else -1
        size = 11 if width >= 5 + 6.4 * digits and height >= 13 else 9
        if number >= 0 and height >= 11 and width >= 1.5 + 5.3 * digits:
            place = (span.x + width / 2, y + height / 2 + 0.36 * size)
            numbers.append(Words(str(number), *place, size, span.style, "middle"))
    drawn = (
        Run(y, height, style, tuple(sorted(spans)), strength)
        for (style, strength), spans in runs.items()
    )
    return [*drawn, *marks, *numbers]


def block_label(block: DrawnEvent) -> str:
    event = block.event
    parts = [f"device {event.device}: {KIND_WORDS[event.kind]}"]
    if event.micro_batch >= 0:
        parts.append(f"stage {event.stage}, micro-batch {event.micro_batch}")
    if event.peer >= 0:
        parts.append(f"{'from' if event.kind == 'RECV' else 'to'} device {event.peer}")
    if event.bytes > 0:
        parts.append(size_text(event.bytes))
    parts.append(f"{seconds_text(event.start_s)} to {seconds_text(event.end_s)}")
    return ", ".join(parts)


def legend_marks(entries: Sequence[LegendEntry], left: float, right: float, y: float) -> Panel:
    """Words with swatches of their colours, in lines; also the baseline of the last line."""
    marks: list[Mark] = []
    x = left
    for words, colours in entries:
        shown = colours if len(colours) <= 4 else (colours[0], colours[-1])
        needed = 12 * len(shown) + 6 + 6.6 * len(words)
        if x > left and x + needed > right:
            x, y = left, y + 20
        marks += [Slab(x + 12 * i, y - 10, 12, 12, colour) for i, colour in enumerate(shown)]
        marks.append(Words(words, x + 12 * len(shown) + 6, y, 12, "quiet"))
        x += needed + 18
    return marks, y


FEW_STRIPS, FULLEST = 8, 4
"""Of more than 8 devices, the memory of the 4 fullest is shown."""

STRIP, STRIP_GAP = 34.0, 10.0
FAR = 4.0
"""A limit beyond this many times the peak is given in words, not drawn."""

LINE = Style("F")


def memory_marks(rows: Sequence[DeviceRow], axis: TimeAxis, top: float) -> Panel:
    """A strip with the memory of each device, or of the fullest ones."""
    used = [row for row in rows if row.memory]
    if not used:
        return [], top
    headline = "memory in use"
    if len(used) > FEW_STRIPS:
        used = sorted(sorted(used, key=fullness)[-FULLEST:], key=lambda row: row.device)
        headline += f" on the {FULLEST} fullest devices"
    if any(limit_is_near(row) for row in used):
        headline += "; dashed: the limit"
    marks: list[Mark] = [Words(headline, axis.left, top + 10, 12, "quiet")]
    scale = max(map(top_bytes, used)) or 1.0
    y = top + 18
    for row in used:
        marks += strip_marks(row, axis, y, scale)
        y += STRIP + STRIP_GAP
    return marks, y - STRIP_GAP + 6


def top_bytes(row: DeviceRow) -> float:
    """The upper end of a strip's scale: the peak, or the limit if that is near."""
    return 1.08 * max(row.peak_bytes, row.limit_bytes if limit_is_near(row) else 0.0)


def limit_is_near(row: DeviceRow) -> bool:
    """Whether the limit is known and not far above the peak."""
    return 0 < row.limit_bytes <= FAR * row.peak_bytes


def strip_marks(row: DeviceRow, axis: TimeAxis, y: float, scale: float) -> list[Mark]:
    base = y + STRIP
    line = stepped(row, axis, base, STRIP / scale)
    area = ((line[0][0], base), *line, (line[-1][0], base))
    limit_y = base - row.limit_bytes / scale * STRIP
    is_drawn = row.limit_bytes > 0 and limit_y >= y - 0.5
    limit = Rule(axis.left, limit_y, axis.right, limit_y, "limit", 1.3, dashed=True)
    of_limit = f" of {size_text(row.limit_bytes)}" if row.limit_bytes else ""
    return [
        Slab(axis.left, y, axis.width, STRIP, "row"),
        Curve(area, "area", filled=True),
        Curve(line, LINE),
        *([limit] if is_drawn else []),
        Words(f"device {row.device}", axis.left - 152, y + 14, 12),
        Words(f"peak {size_text(row.peak_bytes)}{of_limit}", axis.left - 152, y + 29, 11, "quiet"),
    ]


def fullness(row: DeviceRow) -> tuple[float, float]:
    """How full a device gets: as a fraction of its limit if known, then in bytes."""
    return (row.peak_bytes / row.limit_bytes if row.limit_bytes else 0.0, row.peak_bytes)


def stepped(
    row: DeviceRow, axis: TimeAxis, base: float, pixels_per_byte: float
) -> tuple[tuple[float, float], ...]:
    """The corners of a curve that shows the most that is in use within each pixel of the axis."""
    levels: list[float] = []
    level, index = row.memory[0][1], 0
    for column in range(round(axis.width)):
        highest, until_s = level, (column + 1) / axis.pixels_per_s
        while index < len(row.memory) and row.memory[index][0] < until_s:
            level = row.memory[index][1]
            highest = max(highest, level)
            index += 1
        levels.append(highest)
    corners: list[tuple[float, float]] = []
    x = axis.left
    for size, same in groupby(levels):
        y, width = base - size * pixels_per_byte, len(list(same))
        corners += [(x, y), (x + width, y)]
        x += width
    return tuple(corners)
