"""A drawing as data: blocks, lines, curves and words in places, before it is SVG or a bitmap.

Lengths are pixels of a screen, from the top left corner. Colours are names of a theme's fields or
styles of blocks, so that one drawing serves light and dark.
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
"""The colour of a share of a critical path that has no kind of event."""

Ink: TypeAlias = Literal["paper", "ink", "quiet", "grid", "row", "area", "limit"] | ShareInk
"""A colour of the theme that is no block's."""

TAIL_GAP = 8.0
"""Pixels between a text and its tail."""

Anchor: TypeAlias = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Slab:
    """A rectangle; ``label`` is shown to those who point at it."""

    x: float
    y: float
    width: float
    height: float
    fill: Ink | Style
    label: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Many rectangles of one style on one line, as pairs of place and width, left to right.

    ``strength`` is how much of their place they really fill.
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
    """A line through points, or with ``filled`` the area that they enclose."""

    points: tuple[tuple[float, float], ...]
    ink: Ink | Style
    filled: bool = False
    width: float = 1.4


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text on a baseline; ``ink`` is a theme's colour, or what suits a block's style.

    ``tail`` goes on behind it, on the same line; its own place does not count.
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
    """Marks in the order in which they are drawn, on paper of this size."""

    width: float
    height: float
    title: str
    marks: tuple[Mark, ...]

    @property
    def styles(self) -> tuple[Style, ...]:
        """Every style of a block, once."""
        return tuple(colour for colour in self.colours if isinstance(colour, Style))

    @property
    def colours(self) -> tuple[Ink | Style, ...]:
        """Every colour of a mark, once."""
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
