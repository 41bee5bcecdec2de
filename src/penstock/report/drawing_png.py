"""Renders a drawing as a bitmap, with Pillow."""

import io
from dataclasses import replace
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from penstock.report.drawing import (
    TAIL_GAP,
    Curve,
    Drawing,
    Ink,
    Mark,
    Rule,
    Run,
    Slab,
    Words,
)
from penstock.report.palette import THEMES, Style, Theme, fill_of, ink_on, mixed

__all__ = ["drawing_png"]

SCALE = 2
"""Pixels of the bitmap for each pixel of the drawing, for high-resolution screens."""

DASH, GAP = 5, 3


def drawing_png(drawing: Drawing) -> bytes:
    """The bytes of a PNG file, in light colours."""
    theme = THEMES["light"]
    size = (round(drawing.width * SCALE), round(drawing.height * SCALE))
    image = Image.new("RGB", size, theme.paper)
    pen = ImageDraw.Draw(image)
    for mark in drawing.marks:
        draw(pen, mark, theme)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def draw(pen: ImageDraw.ImageDraw, mark: Mark, theme: Theme) -> None:
    """Draw a mark."""
    match mark:
        case Slab():
            fill_box(pen, mark.x, mark.y, mark.width, mark.height, colour_of(mark.fill, theme))
        case Run():
            colour = mixed(theme.row, colour_of(mark.fill, theme), mark.strength)
            for x, width in mark.spans:
                fill_box(pen, x, mark.y, width, mark.height, colour)
        case Rule():
            draw_rule(pen, mark, theme)
        case Curve():
            points = [(x * SCALE, y * SCALE) for x, y in mark.points]
            if mark.filled:
                pen.polygon(points, fill=colour_of(mark.ink, theme))
            else:
                width = round(mark.width * SCALE)
                pen.line(points, fill=colour_of(mark.ink, theme), width=width, joint="curve")
        case Words():
            draw_words(pen, mark, theme)


def fill_box(
    pen: ImageDraw.ImageDraw, x: float, y: float, width: float, height: float, colour: str
) -> None:
    """Fill a rectangle of whole pixels, at least one pixel wide and high."""
    left, top = round(x * SCALE), round(y * SCALE)
    right = max(round((x + width) * SCALE), left + 1)
    bottom = max(round((y + height) * SCALE), top + 1)
    pen.rectangle((left, top, right - 1, bottom - 1), fill=colour)


def draw_rule(pen: ImageDraw.ImageDraw, rule: Rule, theme: Theme) -> None:
    """Draw a line; only horizontal ones can be dashed."""
    colour, width = colour_of(rule.ink, theme), max(1, round(rule.width * SCALE))
    pieces = [(rule.x1, rule.x2)]
    if rule.dashed and rule.y1 == rule.y2:
        length = rule.x2 - rule.x1
        starts = [rule.x1 + i * (DASH + GAP) for i in range(int(length // (DASH + GAP)) + 1)]
        pieces = [(x, min(x + DASH, rule.x2)) for x in starts]
    for left, right in pieces:
        ends = (left * SCALE, rule.y1 * SCALE, right * SCALE, rule.y2 * SCALE)
        pen.line(ends, fill=colour, width=width)


def draw_words(pen: ImageDraw.ImageDraw, words: Words, theme: Theme) -> None:
    """Draw a line of text; the font has no micro sign, so that becomes a "u"."""
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[words.anchor]
    colour = (
        ink_on(fill_of(words.ink, theme))
        if isinstance(words.ink, Style)
        else colour_of(words.ink, theme)
    )
    text, font = words.words.replace("µ", "u"), font_of(words.size)
    pen.text(
        (words.x * SCALE, words.y * SCALE),
        text,
        fill=colour,
        font=font,
        anchor=anchor,
        stroke_width=0.4 * SCALE if words.bold else 0,
    )
    if words.tail is not None:
        x = words.x + font.getlength(text) / SCALE + TAIL_GAP
        draw_words(pen, replace(words.tail, x=x, y=words.y), theme)


@cache
def font_of(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's built-in font, which is the same on every machine."""
    return ImageFont.load_default(size * SCALE)


def colour_of(colour: Ink | Style, theme: Theme) -> str:
    """A colour as ``#rrggbb``."""
    return fill_of(colour, theme) if isinstance(colour, Style) else getattr(theme, colour)
