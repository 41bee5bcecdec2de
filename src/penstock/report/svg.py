"""The few shapes that pictures are made of, as SVG text; styles are classes."""

from html import escape
from math import floor, log10

__all__ = ["cut_mark", "line", "rect", "shortened", "text", "tick_text", "ticks"]


def ticks(end_s: float) -> list[float]:
    """Round times from 0 to the end, about eight.

    >>> ticks(0.83)
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    """
    scale = 10.0 ** floor(log10(end_s / 8))
    step = next(scale * f for f in (1, 2, 2.5, 5, 10) if scale * f * 8.5 >= end_s)
    return [round(i * step, 12) for i in range(floor(end_s / step + 1e-9) + 1)]


def tick_text(time_s: float, end_s: float) -> str:
    """A tick in the unit of the whole axis.

    >>> tick_text(0.25, 0.8), tick_text(2.5, 20)
    ('250 ms', '2.5 s')
    """
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, scale = next(((u, s) for u, s in units if end_s > s), units[-1])
    return f"{round(time_s / scale, 6):g} {unit}"


def cut_mark(x: float, y: float, height: float) -> str:
    """Two slanted strokes: the bar goes on."""
    return f'<path class="cut" d="M{x:.1f} {y + height:.1f}l8 {-height:.1f}h6l-8 {height:.1f}z"/>'


def shortened(words: str, most: int) -> str:
    """At most so many characters.

    >>> shortened("a long story", 8)
    'a long…'
    """
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def rect(x: float, y: float, width: float, height: float, style: str, label: str = "") -> str:
    """A rectangle, with words for those who point at it."""
    shape = (
        f'<rect class="{style}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    )
    return f"{shape}><title>{escape(label)}</title></rect>" if label else f"{shape}/>"


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A straight line."""
    return f'<line class="{style}" x1="{x1:.2f}" y1="{y1:.1f}" x2="{x2:.2f}" y2="{y2:.1f}"/>'


def text(words: str, x: float, y: float, style: str) -> str:
    """A line of text."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
