"""Merges blocks narrower than a pixel, so that charts of long timelines stay small."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.report.device_rows import DrawnEvent
from penstock.report.palette import Style

__all__ = ["DrawnSpan", "merged_blocks"]

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
