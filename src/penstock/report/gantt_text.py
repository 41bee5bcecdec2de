"""A timeline as a Gantt chart of characters, for terminals."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import floor, log10

from rich.color import Color, ColorSystem
from rich.text import Text

from penstock.text import percent_text, seconds_text
from penstock.timeline.device_rows import DrawnEvent, GanttRows, gantt_rows
from penstock.timeline.metrics import COMPUTE, bubble_fraction, iteration_s
from penstock.timeline.palette import LIGHT, Style, fill_of, ink_on, legend_entries
from penstock.timeline.timeline import Timeline

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
    gutter = max(len(f"device {row.device}") for row in chart.rows) + 2
    columns = max(width - gutter, NARROWEST)
    hidden, head = len(chart.rows) - most_rows, most_rows - most_rows // 2
    lines: list[str] = []
    for index, row in enumerate(chart.rows):
        if index == head and hidden > 0:
            lines.append(f"{'':<{gutter}}... {hidden} more devices ...")
        if head <= index < head + hidden:
            continue
        for label, lane in zip((f"device {row.device}", ""), row.compute, strict=False):
            lines.append(label.ljust(gutter) + lane_text(lane, chart.end_s, columns, colour))
    lines.append(" " * gutter + axis_line(chart.end_s, columns))
    lines += legend_lines(chart, width, colour)
    bubble = percent_text(bubble_fraction(timeline))
    lines.append(f"{seconds_text(chart.end_s)}, bubble {bubble}")
    return "\n".join(lines)


def lane_text(blocks: Sequence[DrawnEvent], end_s: float, columns: int, colour: bool) -> str:
    """The characters of a lane; each column shows the block that runs at the middle of its time."""
    shown: list[DrawnEvent | None] = [None] * columns
    for block in blocks:
        ends_s = block.event.start_s, block.event.end_s
        first, stop = (round(time_s / end_s * columns) for time_s in ends_s)
        shown[first:stop] = [block] * (stop - first)
    runs = ((block, len(list(same))) for block, same in groupby(shown))
    return "".join(run_text(block, length, colour) for block, length in runs)


def run_text(block: DrawnEvent | None, columns: int, colour: bool) -> str:
    """The characters of consecutive columns that show a block, or that nothing runs."""
    if block is None:
        return f"{FAINT}{IDLE * columns}{RESET}" if colour else IDLE * columns
    style, number = block.style, block.event.micro_batch
    digits = str(number) if number >= 0 else ""
    if not colour:
        words = letter(style) + digits
        return (words if len(words) <= columns else letter(style)).ljust(columns, "-")
    words = digits if len(digits) < columns or columns == len(digits) == 1 else ""
    return painted(words.center(columns), style)


def painted(words: str, style: Style) -> str:
    paper, ink = (terminal_code(c) for c in (fill_of(style, LIGHT), ink_on(fill_of(style, LIGHT))))
    return f"\x1b[48;5;{paper};38;5;{ink}m{words}{RESET}"


def terminal_code(colour: str) -> int | None:
    """The code of the nearest of a terminal's 256 colours."""
    return Color.parse(colour).downgrade(ColorSystem.EIGHT_BIT).number


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


def ticks(end_s: float) -> list[float]:
    """About eight round times from 0 to the end.

    >>> ticks(0.83)
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    """
    scale = 10.0 ** floor(log10(end_s / 8))
    step = next(scale * f for f in (1, 2, 2.5, 5, 10) if scale * f * 8.5 >= end_s)
    return [round(i * step, 12) for i in range(floor(end_s / step + 1e-9) + 1)]


def tick_text(time_s: float, end_s: float) -> str:
    """The text of a tick, in one unit for the whole axis.

    >>> tick_text(0.25, 0.8), tick_text(2.5, 20)
    ('250 ms', '2.5 s')
    """
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, scale = next(((u, s) for u, s in units if end_s > s), units[-1])
    return f"{round(time_s / scale, 6):g} {unit}"


def legend_lines(chart: GanttRows, width: int, colour: bool) -> list[str]:
    """The meaning of colours or letters, wrapped to the width."""
    entries: list[str] = []
    for words, styles in legend_entries(chart.styles):
        swatch = "".join(painted(" " if len(styles) > 1 else "  ", style) for style in styles)
        entries.append(f"{swatch if colour else letter(Style(styles[0].kind))} {words}")
    entries.append(f"{IDLE} idle")
    if chart.shade_words:
        in_turn = f"capital, small letters in turn: the {chart.shades} stages of a device"
        small = chart.shade_words.replace("light:", "small letters:") if chart.mirrored else in_turn
        entries.append(chart.shade_words if colour else small)
    return broken(entries, width)


def broken(entries: Sequence[str], width: int) -> list[str]:
    lines: list[str] = []
    room = 0
    for entry in entries:
        length = Text.from_ansi(entry).cell_len
        if lines and length + 2 <= room:
            lines[-1] += f"  {entry}"
            room -= length + 2
        else:
            lines.append(entry)
            room = width - length
    return lines
