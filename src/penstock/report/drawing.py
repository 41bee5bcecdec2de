"""A drawing as data: rectangles, lines, curves and words; and its SVG.

Lengths are screen pixels from the top left corner. Colours are names of a theme's fields or styles
of blocks, so that one drawing serves both light and dark themes. The SVG is one file without
scripts, light or dark like the reader's system.
"""

from dataclasses import dataclass
from html import escape
from typing import Literal, TypeAlias

from penstock.report.palette import THEMES, Ink, Style, Theme, fill_of, ink_on

__all__ = ["Curve", "Drawing", "Mark", "Rule", "Run", "Slab", "Words", "drawing_svg"]

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


@dataclass(frozen=True, slots=True)
class Slab:
    """A rectangle; ``label`` is its tooltip."""

    x: float
    y: float
    width: float
    height: float
    fill: Ink | Style
    label: str = ""

    @property
    def svg(self) -> str:
        shape = (
            f'<rect class="{class_of(self.fill)}" x="{short(self.x)}" y="{short(self.y)}" '
            f'width="{self.width:.2f}" height="{short(self.height)}"'
        )
        return f"{shape}><title>{escape(self.label)}</title></rect>" if self.label else f"{shape}/>"


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

    @property
    def svg(self) -> str:
        # One interrupted line, as thick as the rectangles are high.
        parts: list[str] = []
        at = 0.0
        for x, width in self.spans:
            left, right = round(x, 1), round(x + width, 1)
            start = f"M{short(left)} {self.y + self.height / 2:g}"
            parts.append(f"m{short(left - at)} 0" if parts else start)
            parts.append(f"h{short(right - left)}")
            at = right
        faint = f' opacity="{self.strength:g}"' if self.strength < 1 else ""
        return (
            f'<path class="line line-{self.fill.name}" stroke-width="{self.height:g}"{faint} '
            f'd="{"".join(parts)}"/>'
        )


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

    @property
    def svg(self) -> str:
        dashes = ' stroke-dasharray="5 3"' if self.dashed else ""
        return (
            f'<line class="line-{self.ink}" x1="{short(self.x1)}" y1="{short(self.y1)}" '
            f'x2="{short(self.x2)}" y2="{short(self.y2)}" stroke-width="{self.width:g}"{dashes}/>'
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points or, if ``filled``, the area that they enclose."""

    points: tuple[tuple[float, float], ...]
    ink: Ink | Style
    filled: bool = False
    width: float = 1.4

    @property
    def svg(self) -> str:
        name = class_of(self.ink)
        path = "M" + "L".join(f"{short(x)} {short(y)}" for x, y in self.points)
        if self.filled:
            return f'<path class="{name}" d="{path}z"/>'
        return f'<path class="line line-{name}" stroke-width="{self.width}" d="{path}"/>'


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text on a baseline. If ``ink`` is a style, the text has a colour that suits it.

    ``tail`` follows on the same line, smaller and quiet.
    """

    words: str
    x: float
    y: float
    size: float = 12.0
    ink: Ink | Style = "ink"
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    tail: str = ""

    @property
    def svg(self) -> str:
        name = f"on-{self.ink.name}" if isinstance(self.ink, Style) else self.ink
        anchor = "" if self.anchor == "start" else f' text-anchor="{self.anchor}"'
        weight = ' font-weight="650"' if self.bold else ""
        tail = ""
        if self.tail:
            font = 'class="quiet" font-size="12" font-weight="400"'
            tail = f'<tspan {font} dx="8">{escape(self.tail)}</tspan>'
        return (
            f'<text class="{name}" x="{short(self.x)}" y="{short(self.y)}" '
            f'font-size="{self.size:g}"{anchor}{weight}>{escape(self.words)}{tail}</text>'
        )


Mark: TypeAlias = Slab | Run | Rule | Curve | Words


@dataclass(frozen=True, slots=True)
class Drawing:
    """Marks in drawing order, on paper of this size in pixels."""

    width: float
    height: float
    title: str
    marks: tuple[Mark, ...]

    @property
    def colours(self) -> tuple[Ink | Style, ...]:
        found: dict[Ink | Style, None] = {}
        for mark in self.marks:
            found[mark.fill if isinstance(mark, Slab | Run) else mark.ink] = None
        return tuple(found)


def drawing_svg(drawing: Drawing, name: str = "timeline") -> str:
    """The text of an SVG file; ``name`` prefixes its CSS rules, to separate them from a page's."""
    width, height = f"{drawing.width:g}", f"{drawing.height:g}"
    marks = "\n".join(mark.svg for mark in drawing.marks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" class="{name}" role="img" aria-label="{escape(drawing.title)}">\n'
        f"<style>\n{style_sheet(drawing, name)}</style>\n"
        f'<rect class="paper" width="{width}" height="{height}"/>\n{marks}\n</svg>\n'
    )


def style_sheet(drawing: Drawing, name: str) -> str:
    """The CSS rules for every colour in use, and for the dark ones that differ."""
    light, dark = (theme_rules(drawing, THEMES[key]) for key in ("light", "dark"))
    lines = [
        f".{name} text {{ font-family: {FONT}; font-variant-numeric: tabular-nums; "
        f"pointer-events: none; }}",
        f".{name} .line {{ fill: none; stroke-linejoin: round; }}",
        *(f".{name} {rule}" for rule in light),
        "@media (prefers-color-scheme: dark) {",
        *(f"  .{name} {rule}" for rule in dark if rule not in set(light)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def theme_rules(drawing: Drawing, theme: Theme) -> list[str]:
    """The rules of a theme: ``.name`` fills, ``.line-name`` draws, ``.on-name`` is text on it."""
    rules: list[str] = []
    used: dict[Ink | Style, None] = {"paper": None, "quiet": None}
    for colour in used | dict.fromkeys(drawing.colours):
        name = class_of(colour)
        shown = fill_of(colour, theme) if isinstance(colour, Style) else theme.inks[colour]
        rules += [f".{name} {{ fill: {shown}; }}", f".line-{name} {{ stroke: {shown}; }}"]
        if isinstance(colour, Style):
            rules.append(f".on-{name} {{ fill: {ink_on(shown)}; }}")
    return rules


def class_of(colour: Ink | Style) -> str:
    return colour.name if isinstance(colour, Style) else colour


def short(length: float) -> str:
    """A length with at most one decimal.

    >>> short(12.04), short(0.25), short(-0.01)
    ('12', '0.2', '0')
    """
    return f"{round(length, 1) + 0.0:g}"
