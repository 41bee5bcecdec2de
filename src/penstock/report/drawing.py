"""A drawing as data: rectangles, lines, curves and words, independent of SVG.

Lengths are screen pixels from the top left corner. Colours are names of a theme's fields or styles
of blocks, so that one drawing serves both light and dark themes.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.report.palette import Style

__all__ = [
    "TAIL_GAP",
    "Anchor",
    "Curve",
    "Drawing",
    "Ink",
    "Mark",
    "Rule",
    "Run",
    "ShareInk",
    "Slab",
    "Words",
]

ShareInk: TypeAlias = Literal["compute", "fill", "other", "waiting"]
"""The colour of a share of a critical path that is not a kind of event."""

Ink: TypeAlias = Literal["paper", "ink", "quiet", "grid", "row", "area", "limit"] | ShareInk
"""A colour of the theme that is not the style of a block."""

TAIL_GAP = 8.0
"""Pixels between a text and its tail."""

Anchor: TypeAlias = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Slab:
    """A rectangle; ``label`` is its tooltip."""

    x: float
    y: float
    width: float
    height: float
    fill: Ink | Style
    label: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Many rectangles of one style in one row, as pairs of x and width, from left to right.

    ``strength`` is the fraction of their area that is really busy.
    """

    y: float
    height: float
    fill: Style
    spans: tuple[tuple[float, float], ...]
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class Rule:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    ink: Ink
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points or, if ``filled``, the area that they enclose."""

    points: tuple[tuple[float, float], ...]
    ink: Ink | Style
    filled: bool = False
    width: float = 1.4


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text on a baseline. If ``ink`` is a style, the text has a colour that suits it.

    ``tail`` follows on the same line; its own position is ignored.
    """

    words: str
    x: float
    y: float
    size: float = 12.0
    ink: Ink | Style = "ink"
    anchor: Anchor = "start"
    bold: bool = False
    tail: "Words | None" = None


Mark: TypeAlias = Slab | Run | Rule | Curve | Words


@dataclass(frozen=True, slots=True)
class Drawing:
    """Marks in drawing order, on paper of this size in pixels."""

    width: float
    height: float
    title: str
    marks: tuple[Mark, ...]

    @property
    def styles(self) -> tuple[Style, ...]:
        """All styles of blocks, without duplicates."""
        return tuple(colour for colour in self.colours if isinstance(colour, Style))

    @property
    def colours(self) -> tuple[Ink | Style, ...]:
        """All colours of marks, without duplicates."""
        found: dict[Ink | Style, None] = {}
        for mark in self.marks:
            found[colour_of(mark)] = None
        return tuple(found)


def colour_of(mark: Mark) -> Ink | Style:
    """The colour of a mark."""
    match mark:
        case Slab() | Run():
            return mark.fill
        case Rule() | Curve() | Words():
            return mark.ink
