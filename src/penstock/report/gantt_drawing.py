"""A timeline as a drawing: a row for each device, its messages below, and memory at the bottom."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.report.device_rows import DeviceRow, DrawnEvent, GanttRows, row_ends, stage_names
from penstock.report.drawing import Curve, Drawing, Mark, Rule, Run, Slab, Words
from penstock.report.palette import KIND_WORDS, Style
from penstock.report.time_axis import TimeAxis, tick_text, ticks
from penstock.words import size_text

__all__ = [
    "RowHeights",
    "block_label",
    "blocks_of",
    "gantt_drawing",
    "grid_marks",
    "row_heights",
    "row_marks",
    "shade_words",
]

WIDTH, MARGIN, GUTTER = 1360.0, 28.0, 180.0
MOST_ROWS = 64
HIDDEN = 26.0
"""Height of the line that says how many rows are left out, in pixels."""

FEW_BLOCKS = 2500
"""Up to this many blocks, each block has a tooltip."""

NARROWEST, NARROWEST_MESSAGE = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class RowHeights:
    """Heights in pixels: compute, each lane of messages, and the gap below; and the font size."""

    compute: float
    lane: float
    gap: float
    font: float

    @property
    def pitch(self) -> float:
        """The distance from one row to the next."""
        return self.compute + 2 * self.lane + self.gap


def gantt_drawing(
    chart: GanttRows, title: str, note: str = "", unit: str = "s", width: float = WIDTH
) -> Drawing:
    """The drawing of a chart; of more than 64 devices the first and last ones are shown.

    ``unit``, if not ``s``, names the unit of times that are not in seconds.
    """
    head, tail = row_ends(len(chart.rows), MOST_ROWS)
    shown = (*chart.rows[:head], *chart.rows[len(chart.rows) - tail :])
    heights = row_heights(len(shown), chart.has_transfers)
    axis = TimeAxis(GUTTER, width - MARGIN, chart.end_s or 1.0, unit)
    marks: list[Mark] = [Words(title, MARGIN, 38, 20, bold=True)]
    if note:
        marks.append(Words(note, MARGIN, 59, 12.5, "quiet"))
    legend, top = legend_marks(chart, width, 84 if note else 66)
    marks += legend
    rows_top = top + 18
    hidden = len(chart.rows) - len(shown)
    bottom = rows_top + heights.pitch * len(shown) - heights.gap + (HIDDEN if hidden else 0)
    memory, end = memory_marks(shown, axis, bottom + 14) if chart.has_memory else ([], bottom)
    marks += grid_marks(axis, rows_top - 5, end)
    with_labels = sum(map(blocks_of, shown)) <= FEW_BLOCKS
    for index, row in enumerate(shown):
        y = rows_top + index * heights.pitch + (HIDDEN if hidden and index >= head else 0)
        marks += row_marks(row, axis, y, heights, with_labels, chart.has_transfers)
        marks += label_marks(row, index, y, heights)
    if hidden:
        y = rows_top + head * heights.pitch + 15
        marks.append(Words(f"... {hidden} more devices ...", GUTTER, y, 11.5, "quiet"))
    marks += memory
    marks += axis_marks(axis, end)
    return Drawing(width, end + 40, title, tuple(marks))


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


def blocks_of(row: DeviceRow) -> int:
    """The number of blocks of a row."""
    return sum(map(len, row.compute)) + len(row.sends) + len(row.receives)


def row_marks(
    row: DeviceRow,
    axis: TimeAxis,
    y: float,
    heights: RowHeights,
    with_labels: bool,
    has_transfers: bool,
) -> list[Mark]:
    """A device: what it computes, and below it what it sends and receives."""
    marks: list[Mark] = [Slab(axis.left, y, axis.width, heights.compute, "row")]
    height = heights.compute / len(row.compute)
    gap = 1.0 if len(row.compute) > 1 else 0.0
    for index, lane in enumerate(row.compute):
        marks += lane_marks(lane, axis, y + index * height, height - gap, NARROWEST, with_labels)
    if has_transfers:
        for index, lane in enumerate((row.sends, row.receives)):
            place = y + heights.compute + 1 + index * heights.lane
            height = heights.lane - (1 if heights.lane > 2 else 0.4)
            marks += lane_marks(lane, axis, place, height, NARROWEST_MESSAGE, with_labels)
    return marks


def lane_marks(
    blocks: Sequence[DrawnEvent],
    axis: TimeAxis,
    y: float,
    height: float,
    narrowest: float,
    with_labels: bool,
) -> list[Mark]:
    """The blocks of a lane, with tooltips or merged into runs, and the numbers that fit on them."""
    marks: list[Mark] = []
    digits = len(str(max((block.event.micro_batch for block in blocks), default=0)))
    runs: dict[tuple[Style, float], list[tuple[float, float]]] = defaultdict(list)
    numbers: list[Mark] = []
    for span in merged_blocks(blocks, axis.left, axis.pixels_per_s, narrowest):
        gap = 0.8 if span.width > 4 else 0.3 if span.width > 2 and span.blocks else 0.0
        width = span.width - gap
        if with_labels and span.blocks:
            label = block_label(span.blocks[0], axis)
            marks.append(Slab(span.x, y, width, height, span.style, label))
        else:
            runs[span.style, span.strength].append((span.x, width))
        number = span.blocks[0].event.micro_batch if span.blocks else -1
        size = 11 if width >= 5 + 6.4 * digits and height >= 13 else 9
        if number >= 0 and height >= 11 and width >= 1.5 + 5.3 * digits:
            place = (span.x + width / 2, y + height / 2 + 0.36 * size)
            numbers.append(Words(str(number), *place, size, span.style, "middle"))
    drawn = (
        Run(y, height, style, tuple(sorted(spans)), strength)
        for (style, strength), spans in runs.items()
    )
    return [*drawn, *marks, *numbers]


def block_label(block: DrawnEvent, axis: TimeAxis) -> str:
    """The tooltip of a block, in one line."""
    event = block.event
    parts = [f"device {event.device}: {KIND_WORDS[event.kind]}"]
    if event.micro_batch >= 0:
        parts.append(f"stage {event.stage}, micro-batch {event.micro_batch}")
    if event.peer >= 0:
        parts.append(f"{'from' if event.kind == 'RECV' else 'to'} device {event.peer}")
    if event.bytes > 0:
        parts.append(size_text(event.bytes))
    parts.append(f"{axis.time_text(event.start_s)} to {axis.time_text(event.end_s)}")
    return ", ".join(parts)


def label_marks(row: DeviceRow, index: int, y: float, heights: RowHeights) -> list[Mark]:
    """The device and its stages at the left of a row; only every second if rows are low."""
    middle = y + heights.compute / 2 + heights.font * 0.36
    if heights.pitch < heights.font + 2 and index % 2:
        return []
    device = Words(f"device {row.device}", MARGIN, middle, heights.font)
    stages = Words(stage_names(row.stages), GUTTER - 10, middle, heights.font - 1, "quiet", "end")
    return [device, stages]


def legend_marks(chart: GanttRows, width: float, y: float) -> tuple[list[Mark], float]:
    """The legend, with a swatch of every shade; also the baseline of its last line."""
    occurring = {style.kind for style in chart.styles}
    computing = {block.event.kind for row in chart.rows for lane in row.compute for block in lane}
    marks: list[Mark] = []
    x = MARGIN
    for kind, words in KIND_WORDS.items():
        if kind not in occurring:
            continue
        shades = chart.shades if kind in computing and kind != "STEP" else 1
        steps = sorted({0, shades - 1} | (set(range(shades)) if shades <= 4 else set()))
        needed = 12 * len(steps) + 6 + 6.6 * len(words) + 18
        if x + needed > width - MARGIN:
            x, y = MARGIN, y + 20
        for step in steps:
            marks.append(Slab(x, y - 10, 12, 12, Style(kind, step, shades)))
            x += 12
        marks.append(Words(words, x + 6, y, 12, "quiet"))
        x += needed - 12 * len(steps)
    if chart.shades > 1:
        words = shade_words(chart)
        if x + 6 * len(words) > width - MARGIN:
            x, y = MARGIN, y + 20
        marks.append(Words(words, x, y, 12, "quiet"))
    return marks, y


def shade_words(chart: GanttRows) -> str:
    """What the shades of a kind mean."""
    if chart.mirrored:
        return "light: odd micro-batches, the other way round"
    return f"dark to light: the {chart.shades} stages of a device, upstream first"


def grid_marks(axis: TimeAxis, top: float, bottom: float) -> list[Mark]:
    """A vertical line at every tick."""
    return [Rule(x, top, x, bottom, "grid") for x in map(axis.x, ticks(axis.end_s))]


def axis_marks(axis: TimeAxis, bottom: float) -> list[Mark]:
    """The times under the ticks, and the end time."""
    marks: list[Mark] = [Rule(axis.left, bottom, axis.right, bottom, "quiet")]
    end = axis.time_text(axis.end_s)
    room = axis.right - 7 * len(end) - 14
    for time_s in ticks(axis.end_s):
        x = axis.x(time_s)
        marks.append(Rule(x, bottom, x, bottom + 4, "quiet"))
        if x < room - 10:
            words = tick_text(time_s, axis.end_s) if axis.unit == "s" else f"{time_s:g}"
            marks.append(Words(words, x, bottom + 19, 12, "quiet", "middle"))
    marks.append(Rule(axis.right, bottom, axis.right, bottom + 4, "ink"))
    marks.append(Words(end, axis.right, bottom + 19, 12, "ink", "end", bold=True))
    return marks


STRENGTHS = 4
"""Number of levels that show how busy a merged span is."""


@dataclass(frozen=True, slots=True)
class DrawnSpan:
    """Where one block is drawn, or several narrow ones, in the style of most of them.

    ``blocks`` is empty for merged blocks; ``strength`` is the fraction of the span that they fill.
    """

    x: float
    width: float
    style: Style
    strength: float = 1.0
    blocks: tuple[DrawnEvent, ...] = ()


def merged_blocks(
    blocks: Iterable[DrawnEvent], left: float, pixels_per_s: float, narrowest: float
) -> list[DrawnSpan]:
    """The blocks as spans from x ``left`` on; those below ``narrowest`` pixels are merged.

    Merged spans come first, so that whole blocks are drawn over them.
    """
    whole: list[DrawnSpan] = []
    columns: dict[int, dict[Style, float]] = defaultdict(lambda: defaultdict(float))
    for block in blocks:
        x, width = left + block.start_s * pixels_per_s, pixels_per_s * (block.end_s - block.start_s)
        if width >= narrowest:
            whole.append(DrawnSpan(x, width, block.style, 1.0, (block,)))
        else:
            fill_columns(columns, block, x / narrowest, (x + width) / narrowest)
    return [*joined(columns, narrowest), *whole]


def fill_columns(
    columns: dict[int, dict[Style, float]], block: DrawnEvent, start: float, end: float
) -> None:
    """Add the parts of one or two columns that a narrow block fills."""
    first = int(start)
    inside = min(end, first + 1.0) - start
    columns[first][block.style] += inside
    if end > first + 1.0:
        columns[first + 1][block.style] += end - first - 1.0


def joined(columns: dict[int, dict[Style, float]], width: float) -> list[DrawnSpan]:
    """Spans of neighbouring columns with the same main style and strength."""
    spans: list[DrawnSpan] = []
    last = -2
    for column in sorted(columns):
        shares = columns[column]
        style = max(shares, key=lambda style: shares[style])
        filled = min(sum(shares.values()), 1.0)
        strength = max(1, round(filled * STRENGTHS)) / STRENGTHS
        if spans and column == last + 1 and same(spans, style, strength):
            before = spans[-1]
            spans[-1] = DrawnSpan(before.x, before.width + width, style, strength)
        else:
            spans.append(DrawnSpan(column * width, width, style, strength))
        last = column
    return spans


def same(spans: Sequence[DrawnSpan], style: Style, strength: float) -> bool:
    """Whether the last span has this style and strength."""
    return spans[-1].style == style and spans[-1].strength == strength


MOST_STRIPS = 8
"""Up to this many devices have a strip each; more share one, which shows the fullest device."""

STRIP, STRIP_GAP, PANEL = 34.0, 10.0, 120.0
FAR = 4.0
"""A limit beyond this many times the peak is given in words, not drawn."""

LINE = Style("F")


def memory_marks(rows: Sequence[DeviceRow], axis: TimeAxis, top: float) -> tuple[list[Mark], float]:
    """The marks below ``top``, and the y at which they end."""
    used = [row for row in rows if row.memory]
    if not used:
        return [], top
    headline = "memory in use" if axis.unit == "s" else "micro-batches whose activations are saved"
    if any(limit_is_near(row) for row in used):
        headline += "; dashed: the limit"
    marks: list[Mark] = [Words(headline, axis.left, top + 10, 12, "quiet")]
    top += 18
    if len(used) > MOST_STRIPS:
        return [*marks, *panel_marks(used, axis, top)], top + PANEL + 6
    scale = max(map(top_bytes, used)) or 1.0
    for index, row in enumerate(used):
        y = top + index * (STRIP + STRIP_GAP)
        marks += strip_marks(row, axis, y, scale)
    return marks, top + len(used) * (STRIP + STRIP_GAP) - STRIP_GAP + 6


def top_bytes(row: DeviceRow) -> float:
    """The upper end of a strip's scale: the peak, or the limit if that is near."""
    return 1.08 * max(row.peak_bytes, row.limit_bytes if limit_is_near(row) else 0.0)


def limit_is_near(row: DeviceRow) -> bool:
    """Whether the limit is known and not far above the peak."""
    return 0 < row.limit_bytes <= FAR * row.peak_bytes


def strip_marks(row: DeviceRow, axis: TimeAxis, y: float, scale: float) -> list[Mark]:
    """The memory of one device."""
    base = y + STRIP
    places = [(axis.x(t), base - size / scale * STRIP) for t, size in stepped(row.memory, axis)]
    area = ((places[0][0], base), *places, (places[-1][0], base))
    marks: list[Mark] = [
        Slab(axis.left, y, axis.width, STRIP, "row"),
        Curve(area, "area", filled=True),
        Curve(tuple(places), LINE),
    ]
    marks += limit_marks(row, axis, base, scale, STRIP)
    name = Words(f"device {row.device}", axis.left - 152, y + 14, 12)
    return [*marks, name, Words(peak_text(row, axis), axis.left - 152, y + 29, 11, "quiet")]


def panel_marks(rows: Sequence[DeviceRow], axis: TimeAxis, y: float) -> list[Mark]:
    """The range over all devices, and the fullest device as a line."""
    fullest = max(rows, key=fullness)
    scale, base = max(*map(top_bytes, rows)) or 1.0, y + PANEL
    columns = round(axis.width / 2)
    levels = [levels_by_column(row.memory, axis.end_s, columns) for row in rows]
    low, high = ([pick(column) for column in zip(*levels, strict=True)] for pick in (min, max))
    xs = [axis.left + 2.0 * i for i in range(columns)]
    upper = [(x, base - v / scale * PANEL) for x, v in zip(xs, high, strict=True)]
    lower = [(x, base - v / scale * PANEL) for x, v in zip(xs, low, strict=True)]
    line = [(axis.x(t), base - v / scale * PANEL) for t, v in stepped(fullest.memory, axis)]
    left = axis.left - 152
    return [
        Slab(axis.left, y, axis.width, PANEL, "row"),
        Curve((*upper, *reversed(lower)), "area", filled=True),
        Curve(tuple(line), LINE),
        *limit_marks(fullest, axis, base, scale, PANEL),
        Words(f"line: device {fullest.device}", left, y + 14, 12),
        Words(peak_text(fullest, axis), left, y + 30, 11, "quiet"),
        Words("shaded: all devices,", left, y + 52, 11, "quiet"),
        Words("lowest to highest", left, y + 66, 11, "quiet"),
    ]


def fullness(row: DeviceRow) -> tuple[float, float]:
    """How full a device gets: as a fraction of its limit if known, then in bytes."""
    return (row.peak_bytes / row.limit_bytes if row.limit_bytes else 0.0, row.peak_bytes)


def limit_marks(
    row: DeviceRow, axis: TimeAxis, base: float, scale: float, height: float
) -> list[Mark]:
    """The limit of a device, if known and within the strip."""
    y = base - row.limit_bytes / scale * height
    if not row.limit_bytes or y < base - height - 0.5:
        return []
    return [Rule(axis.left, y, axis.right, y, "limit", 1.3, dashed=True)]


def peak_text(row: DeviceRow, axis: TimeAxis) -> str:
    """The peak of a device, and its limit if known, in words."""
    limit = f" of {axis.size_text(row.limit_bytes)}" if row.limit_bytes else ""
    return f"peak {axis.size_text(row.peak_bytes)}{limit}"


def stepped(memory: Sequence[tuple[float, float]], axis: TimeAxis) -> list[tuple[float, float]]:
    """The corners of a step curve that holds each value until the next, at most two for each pixel.

    Within a pixel the highest value is used.
    """
    corners: list[tuple[float, float]] = []
    level, index, step_s = 0.0, 0, 1.0 / axis.pixels_per_s
    while index < len(memory):
        time_s, highest = memory[index]
        while index < len(memory) and memory[index][0] < time_s + step_s:
            level = memory[index][1]
            highest = max(highest, level)
            index += 1
        before = corners[-1][1] if corners else highest
        corners += [(time_s, before), (time_s, highest)]
        if level != highest:
            later_s = min(time_s + step_s, axis.end_s)
            corners += [(later_s, highest), (later_s, level)]
    return [*corners, (axis.end_s, corners[-1][1])] if corners else []


def levels_by_column(
    memory: Sequence[tuple[float, float]], end_s: float, columns: int
) -> list[float]:
    """The highest value in each of ``columns`` equal spans of time."""
    levels = [0.0] * columns
    value, index = 0.0, 0
    for column in range(columns):
        highest = value
        until_s = (column + 1) / columns * end_s
        while index < len(memory) and memory[index][0] < until_s:
            value = memory[index][1]
            highest = max(highest, value)
            index += 1
        levels[column] = highest
    return levels
