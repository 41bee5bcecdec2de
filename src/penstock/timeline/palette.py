"""The colours of all pictures of timelines: one for each kind of event, a tint for each stage.

The colours of kinds follow Okabe and Ito, "Color Universal Design" (2008), whose palette is
distinct for colour-blind readers. The stages of one device have different tints of these colours.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.timeline.timeline import EventKind

KINDS: dict[EventKind, tuple[str, str, str]] = {
    "F": ("forward", "#0072b2", "#2b86c5"),
    "B": ("backward", "#e69f00", "#e69f00"),
    "I": ("backward for inputs", "#d55e00", "#d55e00"),
    "W": ("backward for weights", "#f0e442", "#f0e442"),
    "R": ("recompute", "#56b4e9", "#56b4e9"),
    "STEP": ("optimizer step", "#cc79a7", "#cc79a7"),
    "SEND": ("send", "#6b7785", "#8d9aa8"),
    "RECV": ("receive", "#a9b3be", "#5d6a78"),
    "REDUCE": ("gradient all-reduce", "#009e73", "#2bb78d"),
}
"""Every kind in the order of a legend: its words, and its colour on light and dark paper."""

KIND_WORDS: dict[EventKind, str] = {kind: words for kind, (words, *_) in KINDS.items()}

TINTS: dict[EventKind, str] = {
    "F": "#b4bfe6",
    "B": "#ffcb85",
    "I": "#dba48c",
    "W": "#f2f3b0",
    "R": "#b9eeff",
}
"""Colours of a device's last stage; stages in between get mixtures. They are chosen so that no two
colours of compute look the same, even with red-green blindness (`tests/timeline/test_palette.py`
measures it)."""


@dataclass(frozen=True, slots=True)
class Style:
    """Look of a block: its kind, and the one of ``shades`` tints of the kind's colour."""

    kind: EventKind
    shade: int = 0
    shades: int = 1


@dataclass(frozen=True)
class Theme:
    """The colours of a picture, as ``#rrggbb``: of its parts, and of kinds of events."""

    inks: dict[str, str]
    kinds: dict[EventKind, str]


INKS: dict[str, tuple[str, str]] = {
    "ink": ("#16202c", "#e6ebf0"),
    "quiet": ("#5c6a7a", "#94a2b1"),
    "grid": ("#dfe4ea", "#2b3540"),
    "row": ("#f0f2f5", "#202933"),
    "area": ("#cfe2ef", "#24435a"),
    "limit": ("#b3261e", "#ff8a80"),
}
LIGHT, DARK = (
    Theme(
        {ink: colours[i] for ink, colours in INKS.items()},
        {kind: colours[i] for kind, (_, *colours) in KINDS.items()},
    )
    for i in (0, 1)
)
THEMES: dict[str, Theme] = {"light": LIGHT, "dark": DARK}


def fill_of(style: Style, theme: Theme) -> str:
    """The colour of a block.

    >>> fill_of(Style("F"), LIGHT), fill_of(Style("F", 1, 2), LIGHT)
    ('#0072b2', '#b4bfe6')
    """
    colour = theme.kinds[style.kind]
    if style.shade == 0 or style.kind not in TINTS:
        return colour
    return mixed(colour, TINTS[style.kind], style.shade / (style.shades - 1))


def legend_entries(styles: Iterable[Style]) -> list[tuple[str, list[Style]]]:
    """Meanings of the kinds, each with its styles, of which the darkest comes first.

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
    return "#" + bytes(round(a + (b - a) * share) for a, b in pairs).hex()


def ink_on(fill: str) -> str:
    """The colour of text on a fill: white on a dark one (luma of ITU-R BT.601), else nearly black.

    >>> ink_on("#0072b2"), ink_on("#f0e442")
    ('#ffffff', '#16202c')
    """
    red, green, blue = channels(fill)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "#16202c"


def channels(colour: str) -> bytes:
    return bytes.fromhex(colour.removeprefix("#"))
