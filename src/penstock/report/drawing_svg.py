"""Renders a drawing as SVG: one file without scripts, light or dark like the reader's system."""

from html import escape
from typing import get_args

from penstock.report.drawing import (
    TAIL_GAP,
    Curve,
    Drawing,
    Ink,
    Mark,
    Rule,
    Run,
    ShareInk,
    Slab,
    Words,
)
from penstock.report.palette import THEMES, Style, Theme, fill_of, ink_on

__all__ = ["drawing_svg"]

INKS: tuple[Ink, ...] = ("paper", "ink", "quiet", "grid", "row", "area", "limit")
SHARES: tuple[ShareInk, ...] = get_args(ShareInk)
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


def drawing_svg(drawing: Drawing, name: str = "timeline") -> str:
    """The text of an SVG file; ``name`` prefixes its CSS rules, to separate them from a page's."""
    width, height = f"{drawing.width:g}", f"{drawing.height:g}"
    marks = "\n".join(mark_svg(mark) for mark in drawing.marks)
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
    for ink in (*INKS, *(share for share in SHARES if share in drawing.colours)):
        colour = getattr(theme, ink)
        rules += [f".{ink} {{ fill: {colour}; }}", f".line-{ink} {{ stroke: {colour}; }}"]
    for style in drawing.styles:
        colour = fill_of(style, theme)
        rules += [
            f".{style.name} {{ fill: {colour}; }}",
            f".line-{style.name} {{ stroke: {colour}; }}",
            f".on-{style.name} {{ fill: {ink_on(colour)}; }}",
        ]
    return rules


def mark_svg(mark: Mark) -> str:
    """The SVG element of a mark."""
    match mark:
        case Slab():
            return slab_svg(mark)
        case Run():
            return run_svg(mark)
        case Rule():
            dashes = ' stroke-dasharray="5 3"' if mark.dashed else ""
            return (
                f'<line class="line-{mark.ink}" x1="{short(mark.x1)}" y1="{short(mark.y1)}" '
                f'x2="{short(mark.x2)}" y2="{short(mark.y2)}" stroke-width="{mark.width:g}"'
                f"{dashes}/>"
            )
        case Curve():
            return curve_svg(mark)
        case Words():
            return words_svg(mark)


def slab_svg(slab: Slab) -> str:
    """A rectangle with its tooltip."""
    shape = (
        f'<rect class="{class_of(slab.fill)}" x="{short(slab.x)}" y="{short(slab.y)}" '
        f'width="{slab.width:.2f}" height="{short(slab.height)}"'
    )
    return f"{shape}><title>{escape(slab.label)}</title></rect>" if slab.label else f"{shape}/>"


def run_svg(run: Run) -> str:
    """Rectangles as one interrupted line whose thickness is their height."""
    parts: list[str] = []
    at = 0.0
    for x, width in run.spans:
        left, right = round(x, 1), round(x + width, 1)
        move = f"m{short(left - at)} 0" if parts else f"M{short(left)} {run.y + run.height / 2:g}"
        parts.append(f"{move}h{short(right - left)}")
        at = right
    faint = f' opacity="{run.strength:g}"' if run.strength < 1 else ""
    return (
        f'<path class="line line-{run.fill.name}" stroke-width="{run.height:g}"{faint} '
        f'd="{"".join(parts)}"/>'
    )


def curve_svg(curve: Curve) -> str:
    """A line or an area."""
    path = "M" + "L".join(f"{short(x)} {short(y)}" for x, y in curve.points)
    if curve.filled:
        return f'<path class="{class_of(curve.ink)}" d="{path}z"/>'
    return (
        f'<path class="line line-{class_of(curve.ink)}" stroke-width="{curve.width}" d="{path}"/>'
    )


def words_svg(words: Words) -> str:
    """A line of text."""
    anchor = "" if words.anchor == "start" else f' text-anchor="{words.anchor}"'
    tail = ""
    if words.tail is not None:
        weight = "" if words.tail.bold else ' font-weight="400"'
        style = f'class="{style_of(words.tail)}" {font_svg(words.tail)}{weight}'
        tail = f'<tspan {style} dx="{TAIL_GAP:g}">{escape(words.tail.words)}</tspan>'
    place = f'x="{short(words.x)}" y="{short(words.y)}"'
    font = font_svg(words, anchor)
    return f'<text class="{style_of(words)}" {place} {font}>{escape(words.words)}{tail}</text>'


def style_of(words: Words) -> str:
    """The CSS class of a text."""
    return f"on-{words.ink.name}" if isinstance(words.ink, Style) else words.ink


def font_svg(words: Words, anchor: str = "") -> str:
    """Size, anchor and weight of a text."""
    return f'font-size="{words.size:g}"{anchor}' + (' font-weight="650"' if words.bold else "")


def class_of(colour: Ink | Style) -> str:
    """The CSS class of a colour."""
    return colour.name if isinstance(colour, Style) else colour


def short(length: float) -> str:
    """A length with at most one decimal.

    >>> short(12.04), short(0.25), short(-0.01)
    ('12', '0.2', '0')
    """
    return f"{round(length, 1) + 0.0:g}"
