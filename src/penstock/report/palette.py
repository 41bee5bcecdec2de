"""The colours of all pictures of timelines: one for each kind of event, a tint for each stage.

The colours of kinds follow Okabe and Ito, "Color Universal Design" (2008), whose palette is
distinct for colour-blind readers. The stages of one device have different tints of these colours.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.timeline.timeline import EventKind

__all__ = [
    "KIND_WORDS",
    "THEMES",
    "TINTS",
    "Ink",
    "Style",
    "Theme",
    "ThemeName",
    "fill_of",
    "ink_on",
    "legend_entries",
    "mixed",
    "terminal_code",
    "terminal_ink",
]

ThemeName: TypeAlias = Literal["light", "dark"]

KINDS: dict[EventKind, tuple[str, str, str, int]] = {
    "F": ("forward", "#0072b2", "#2b86c5", 25),
    "B": ("backward", "#e69f00", "#e69f00", 214),
    "I": ("backward for inputs", "#d55e00", "#d55e00", 166),
    "W": ("backward for weights", "#f0e442", "#f0e442", 227),
    "R": ("recompute", "#56b4e9", "#56b4e9", 74),
    "STEP": ("optimizer step", "#cc79a7", "#cc79a7", 175),
    "SEND": ("send", "#6b7785", "#8d9aa8", 102),
    "RECV": ("receive", "#a9b3be", "#5d6a78", 145),
    "REDUCE": ("gradient all-reduce", "#009e73", "#2bb78d", 35),
}
"""Every kind in the order of a legend: its words, and its colour on light and dark paper and on a
terminal. Codes of terminals are chosen by hand: the nearest would make yellow and orange alike."""

KIND_WORDS: dict[EventKind, str] = {kind: words for kind, (words, *_) in KINDS.items()}

TINTS: dict[EventKind, tuple[str, int]] = {
    "F": ("#b4bfe6", 146),
    "B": ("#ffcb85", 223),
    "I": ("#dba48c", 217),
    "W": ("#f2f3b0", 230),
    "R": ("#b9eeff", 153),
}
"""Colours of a device's last stage; stages in between get mixtures. They are chosen so that no two
colours of compute look alike, even with red-green blindness (`tests/report/test_palette.py`
measures it)."""


@dataclass(frozen=True, slots=True)
class Style:
    """How a block looks: its kind, and which of ``shades`` tints of the kind's colour it has."""

    kind: EventKind
    shade: int = 0
    shades: int = 1

    @property
    def name(self) -> str:
        """The style's name in style sheets.

        >>> Style("F", 1, 2).name
        'F1'
        """
        return f"{self.kind}{self.shade}"


PartInk: TypeAlias = Literal["paper", "ink", "quiet", "grid", "row", "area", "limit"]
ShareInk: TypeAlias = Literal["compute", "fill", "other", "waiting"]
"""The colour of a share of a critical path that is not a kind of event."""

Ink: TypeAlias = PartInk | ShareInk
"""A colour of a theme that is not the style of a block."""


@dataclass(frozen=True)
class Theme:
    """The colours of a picture, as ``#rrggbb``: of its parts, and of kinds of events."""

    inks: dict[Ink, str]
    kinds: dict[EventKind, str]


INKS: dict[Ink, tuple[str, str]] = {
    "paper": ("#ffffff", "#181f27"),
    "ink": ("#16202c", "#e6ebf0"),
    "quiet": ("#5c6a7a", "#94a2b1"),
    "grid": ("#dfe4ea", "#2b3540"),
    "row": ("#f0f2f5", "#202933"),
    "area": ("#cfe2ef", "#24435a"),
    "limit": ("#b3261e", "#ff8a80"),
    "compute": ("#33618f", "#4f86bd"),
    "fill": ("#93b5d6", "#3d6187"),
    "other": ("#c4d6e8", "#2f4a66"),
    "waiting": ("#d9dee4", "#35414d"),
}
LIGHT = Theme(
    {ink: light for ink, (light, _) in INKS.items()},
    {kind: light for kind, (_, light, _, _) in KINDS.items()},
)
DARK = Theme(
    {ink: dark for ink, (_, dark) in INKS.items()},
    {kind: dark for kind, (_, _, dark, _) in KINDS.items()},
)
THEMES: dict[ThemeName, Theme] = {"light": LIGHT, "dark": DARK}

DARK_INK, LIGHT_INK = "#16202c", "#ffffff"
CUBE = (0, 95, 135, 175, 215, 255)
"""The levels of red, green and blue in a terminal's colour cube."""


def fill_of(style: Style, theme: Theme) -> str:
    """The colour of a block.

    >>> fill_of(Style("F"), LIGHT), fill_of(Style("F", 1, 2), LIGHT)
    ('#0072b2', '#b4bfe6')
    """
    colour = theme.kinds[style.kind]
    if style.shade == 0 or style.kind not in TINTS:
        return colour
    return mixed(colour, TINTS[style.kind][0], style.shade / (style.shades - 1))


def legend_entries(styles: Iterable[Style]) -> list[tuple[str, list[Style]]]:
    """What kinds stand for, each with its styles, of which the darkest comes first.

    >>> legend_entries([Style("B"), Style("F", 1, 2), Style("F", 0, 2)])[0]
    ('forward', [Style(kind='F', shade=0, shades=2), Style(kind='F', shade=1, shades=2)])
    """
    found = sorted(set(styles), key=lambda style: style.shade)
    kinds = ((words, [s for s in found if s.kind == kind]) for kind, words in KIND_WORDS.items())
    return [(words, own) for words, own in kinds if own]


def mixed(first: str, second: str, share: float) -> str:
    """A mixture of two colours, with the fraction ``share`` of the second.

    >>> mixed("#000000", "#ffffff", 0.5)
    '#808080'
    """
    pairs = zip(channels(first), channels(second), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def ink_on(fill: str) -> str:
    """The text colour with the best contrast on a fill (contrast ratio, WCAG 2.1, 1.4.3).

    >>> ink_on("#0072b2"), ink_on("#f0e442")
    ('#ffffff', '#16202c')
    """
    contrasts = [(contrast(ink, fill), ink) for ink in (LIGHT_INK, DARK_INK)]
    return max(contrasts)[1]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """The relative luminance of a colour (WCAG 2.1)."""
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
        for c in (value / 255 for value in channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def terminal_code(style: Style) -> int:
    """The code of a block's colour among the 256 colours of a terminal.

    >>> terminal_code(Style("F")), terminal_code(Style("F", 1, 2))
    (25, 146)
    """
    if style.shade == 0:
        return KINDS[style.kind][3]
    if style.shade == style.shades - 1 and style.kind in TINTS:
        return TINTS[style.kind][1]
    return nearest_code(fill_of(style, LIGHT))


def terminal_ink(code: int) -> int:
    """The code of the text colour with the best contrast on a terminal colour.

    >>> terminal_ink(25), terminal_ink(227)
    (231, 16)
    """
    level = code - 16
    rgb = (CUBE[level // 36], CUBE[level // 6 % 6], CUBE[level % 6])
    fill = "#" + "".join(f"{value:02x}" for value in rgb)
    return 231 if ink_on(fill) == LIGHT_INK else 16


def nearest_code(colour: str) -> int:
    """The code of the nearest of the 216 colours in a terminal's cube.

    >>> nearest_code("#0072b2")
    25
    """
    red, green, blue = (
        min(range(6), key=lambda level: abs(CUBE[level] - value)) for value in channels(colour)
    )
    return 16 + 36 * red + 6 * green + blue


def channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
