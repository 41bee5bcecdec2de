"""The time axis of a drawing: which x a time has, the grid, and the times below it."""

from dataclasses import dataclass
from math import floor, log10

from penstock.report.drawing import Mark, Rule, Words
from penstock.words import seconds_text

__all__ = ["TimeAxis", "axis_marks", "grid_marks", "tick_text", "ticks"]


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Maps times from 0 to ``end_s`` to x positions from ``left`` to ``right``."""

    left: float
    right: float
    end_s: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def pixels_per_s(self) -> float:
        return self.width / self.end_s

    @property
    def ticks(self) -> list[float]:
        """The times that are marked; a narrow axis has room for few."""
        return ticks(self.end_s, 8 if self.width > 500 else 3)

    def x(self, time_s: float) -> float:
        return self.left + time_s * self.pixels_per_s


def ticks(end_s: float, about: int = 8) -> list[float]:
    """About so many round times from 0 to the end.

    >>> ticks(0.83), ticks(0.83, 3)
    ([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [0.0, 0.25, 0.5, 0.75])
    """
    scale = 10.0 ** floor(log10(end_s / about))
    step = next(scale * f for f in (1, 2, 2.5, 5, 10) if scale * f * (about + 0.5) >= end_s)
    return [round(i * step, 12) for i in range(floor(end_s / step + 1e-9) + 1)]


def tick_text(time_s: float, end_s: float) -> str:
    """The text of a tick, in one unit for the whole axis.

    >>> tick_text(0.25, 0.8), tick_text(2.5, 20)
    ('250 ms', '2.5 s')
    """
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, scale = next(((u, s) for u, s in units if end_s > s), units[-1])
    return f"{round(time_s / scale, 6):g} {unit}"


def grid_marks(axis: TimeAxis, top: float, bottom: float) -> list[Mark]:
    """A vertical line at every tick."""
    return [Rule(x, top, x, bottom, "grid") for x in map(axis.x, axis.ticks)]


def axis_marks(axis: TimeAxis, bottom: float, with_end: bool = True) -> list[Mark]:
    """The times under the ticks, and ``with_end`` the time at which the axis ends."""
    marks: list[Mark] = [Rule(axis.left, bottom, axis.right, bottom, "quiet")]
    end = seconds_text(axis.end_s) if with_end else ""
    room = axis.right - 7 * len(end) - 24 if end else axis.right
    for time_s in axis.ticks:
        x = axis.x(time_s)
        marks.append(Rule(x, bottom, x, bottom + 4, "quiet"))
        if x <= room:
            words = tick_text(time_s, axis.end_s)
            marks.append(Words(words, x, bottom + 19, 12, "quiet", "middle"))
    if end:
        marks.append(Rule(axis.right, bottom, axis.right, bottom + 4, "ink"))
        marks.append(Words(end, axis.right, bottom + 19, 12, "ink", "end", bold=True))
    return marks
