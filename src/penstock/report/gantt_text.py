"""A timeline as a Gantt chart of characters, for terminals."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from penstock.report.device_rows import DeviceRow, DrawnEvent, GanttRows, gantt_rows, row_ends
from penstock.report.palette import KIND_WORDS, Style, terminal_code, terminal_ink
from penstock.report.time_axis import tick_text, ticks
from penstock.timeline.metrics import COMPUTE, bubble_fraction, iteration_s
from penstock.timeline.timeline import EventKind, Timeline
from penstock.words import percent_text, seconds_text

__all__ = ["gantt"]

NARROWEST = 16
"""The least number of columns of the chart, however narrow the terminal."""

IDLE = "."
FAINT, RESET = "\x1b[2m", "\x1b[0m"


def gantt(timeline: Timeline, width: int = 100, colour: bool = True, most_rows: int = 24) -> str:
    """One row of characters for each device, a time axis and a legend.

    A block has the colour of its kind and shows its micro-batch if that fits. Without ``colour`` it
    starts with the letter of its kind. ``width`` is the columns of the terminal. If there are more
    devices than ``most_rows``, the first and the last are shown. Only compute is shown. Lines have
    no trailing spaces.

    >>> from penstock.timeline.timeline import Event
    >>> events = (Event(0, "F", 0, 0, 0.0, 1.0), Event(0, "B", 0, 0, 2.0, 4.0))
    >>> print(gantt(Timeline(events, 1), width=30, colour=False))
    device 0  F0---.....B0--------
              0 s  1 s  2 s  3 s
    F forward  B backward  . idle
    4.00 s, bubble 25.0 %
    """
    computing = tuple(event for event in timeline.events if event.kind in COMPUTE)
    chart = replace(gantt_rows(Timeline(computing, timeline.devices)), end_s=iteration_s(timeline))
    if not chart.rows or chart.end_s <= 0:
        return "nothing is computed"
    labels = [f"device {row.device}" for row in chart.rows]
    gutter = max(map(len, labels)) + 2
    columns = max(width - gutter, NARROWEST)
    head, tail = row_ends(len(labels), most_rows)
    lines: list[str] = []
    for index, (label, row) in enumerate(zip(labels, chart.rows, strict=True)):
        if index == head and tail:
            lines.append(f"{'':<{gutter}}... {len(labels) - head - tail} more devices ...")
        if index < head or index >= len(labels) - tail:
            lines += row_lines(row, label.ljust(gutter), chart.end_s, columns, colour)
    lines.append(" " * gutter + axis_line(chart.end_s, columns))
    lines += legend_lines(chart, width, colour)
    bubble = percent_text(bubble_fraction(timeline))
    lines.append(f"{seconds_text(chart.end_s)}, bubble {bubble}")
    return "\n".join(lines)


def row_lines(row: DeviceRow, label: str, end_s: float, columns: int, colour: bool) -> list[str]:
    """The line of a device, or two if forwards run beside backwards."""
    return [
        (label if index == 0 else " " * len(label)) + lane_text(lane, end_s, columns, colour)
        for index, lane in enumerate(row.compute)
    ]


def lane_text(blocks: Sequence[DrawnEvent], end_s: float, columns: int, colour: bool) -> str:
    """The characters of a lane: runs of columns that show the same block."""
    owners = column_owners(blocks, end_s, columns)
    parts: list[str] = []
    start = 0
    for column in range(1, columns + 1):
        if column == columns or owners[column] is not owners[start]:
            parts.append(run_text(owners[start], column - start, colour))
            start = column
    return "".join(parts)


def column_owners(
    blocks: Sequence[DrawnEvent], end_s: float, columns: int
) -> list[DrawnEvent | Style | None]:
    """What each column shows: the block that fills half of it, else the main style, or idle."""
    shares: list[dict[int, float]] = [{} for _ in range(columns)]
    for index, block in enumerate(blocks):
        left, right = (t / end_s * columns for t in (block.start_s, block.end_s))
        for column in range(min(int(left), columns - 1), min(int(right), columns - 1) + 1):
            part = min(right, column + 1) - max(left, column)
            if part > 1e-9:
                shares[column][index] = part
    return [owner(share, blocks) for share in shares]


def owner(shares: dict[int, float], blocks: Sequence[DrawnEvent]) -> DrawnEvent | Style | None:
    """The block or style shown in a column, from the shares of blocks by index."""
    idle = 1.0 - sum(shares.values())
    if not shares or idle > 0.5:
        return None
    most = max(shares, key=lambda index: shares[index])
    if shares[most] > 0.499:
        return blocks[most]
    styles: dict[Style, float] = defaultdict(float)
    for index, part in shares.items():
        styles[blocks[index].style] += part
    return max(styles, key=lambda style: styles[style])


def run_text(shown: DrawnEvent | Style | None, columns: int, colour: bool) -> str:
    """The characters of consecutive columns that show the same."""
    if shown is None:
        return f"{FAINT}{IDLE * columns}{RESET}" if colour else IDLE * columns
    style = shown.style if isinstance(shown, DrawnEvent) else shown
    number = shown.event.micro_batch if isinstance(shown, DrawnEvent) else -1
    digits = str(number) if number >= 0 else ""
    if not colour:
        words = letter(style) + digits
        return (words if len(words) <= columns else letter(style)).ljust(columns, "-")
    words = digits if len(digits) < columns or columns == len(digits) == 1 else ""
    return painted(words.center(columns), style)


def painted(words: str, style: Style) -> str:
    """Words on the background colour of a style."""
    code = terminal_code(style)
    return f"\x1b[48;5;{code};38;5;{terminal_ink(code)}m{words}{RESET}"


def letter(style: Style) -> str:
    """The letter of a style; lower case for every second stage of a device.

    >>> letter(Style("STEP")), letter(Style("F", 1, 2))
    ('S', 'f')
    """
    first = style.kind[0]
    return first.lower() if style.shade % 2 else first


def axis_line(end_s: float, columns: int) -> str:
    """The times under their columns: all of them, or every second, third and so on if they fit."""
    marks = [(round(t / end_s * columns), tick_text(t, end_s)) for t in ticks(end_s)]
    marks = [(column, words) for column, words in marks if column + len(words) <= columns]
    for every in range(1, len(marks) + 1):
        line = ""
        for column, words in marks[::every]:
            if line and column < len(line) + 2:
                break
            line = line.ljust(column) + words
        else:
            return line
    return ""


def legend_lines(chart: GanttRows, width: int, colour: bool) -> list[str]:
    """The meaning of colours or letters, wrapped to the width."""
    computed = {block.event.kind for row in chart.rows for lane in row.compute for block in lane}
    kinds: list[EventKind] = [kind for kind in KIND_WORDS if kind in computed]
    if colour:
        entries = [
            f"{swatch(kind, 1 if kind == 'STEP' else chart.shades)} {KIND_WORDS[kind]}"
            for kind in kinds
        ]
    else:
        entries = [f"{letter(Style(kind))} {KIND_WORDS[kind]}" for kind in kinds]
    entries.append(f"{IDLE} idle")
    if chart.shades > 1:
        entries.append(shade_words(chart, colour))
    return broken(entries, width)


def swatch(kind: EventKind, shades: int) -> str:
    """A column of each shade of a kind; two columns if there is only one shade."""
    words = "  " if shades == 1 else " "
    return "".join(painted(words, Style(kind, shade, shades)) for shade in range(shades))


def shade_words(chart: GanttRows, colour: bool) -> str:
    """What shades, or lower-case letters, mean."""
    if chart.mirrored:
        how = "lighter" if colour else "small letters"
        return f"{how}: odd micro-batches, the other way round"
    how = "darker to lighter" if colour else "capital, small letters in turn"
    return f"{how}: the {chart.shades} stages of a device"


def broken(entries: Sequence[str], width: int) -> list[str]:
    """Entries wrapped to as few lines as possible."""
    lines: list[str] = []
    room = 0
    for entry in entries:
        length = len(visible(entry))
        if lines and length + 2 <= room:
            lines[-1] += f"  {entry}"
            room -= length + 2
        else:
            lines.append(entry)
            room = width - length
    return lines


def visible(words: str) -> str:
    """Words without colour codes."""
    parts = words.split("\x1b[")
    return parts[0] + "".join(part.partition("m")[2] for part in parts[1:])
