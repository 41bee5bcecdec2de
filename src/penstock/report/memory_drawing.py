"""Draws the memory of devices over time, on the time axis of the chart above."""

from collections.abc import Sequence

from penstock.report.device_rows import DeviceRow
from penstock.report.drawing import Curve, Mark, Rule, Slab, Words
from penstock.report.palette import Style
from penstock.report.time_axis import TimeAxis

__all__ = ["memory_marks", "stepped"]

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
