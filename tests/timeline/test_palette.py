from itertools import combinations

import pytest

from penstock.report.gantt_text import terminal_code
from penstock.timeline.metrics import COMPUTE
from penstock.timeline.palette import (
    KIND_WORDS,
    THEMES,
    Style,
    fill_of,
)

STYLES = [
    Style(kind, shade, 2)
    for kind in KIND_WORDS
    if kind in COMPUTE
    for shade in ((0,) if kind == "STEP" else (0, 1))
]

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision
# deficiency" (2009), table 1, severity 1.0: linear RGB as it is seen.
EYES = {
    "trichromat": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanope": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranope": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
CLEARLY_APART = 10.0
"""Distance in CIELAB; 2.3 is just noticeable."""


def lab(colour: str, eye: str) -> tuple[float, float, float]:
    """The colour in CIELAB (CIE 1976, D65), as an eye sees it."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True))))
        for row in EYES[eye]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("name", THEMES)
def test_kinds_and_shades_of_computing_look_different(name: str, eye: str) -> None:
    seen = {style: lab(fill_of(style, THEMES[name]), eye) for style in STYLES}
    for (one, a), (other, b) in combinations(seen.items(), 2):
        distance = sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) ** 0.5
        assert distance > CLEARLY_APART, (one, other, distance)


def test_a_terminal_shows_different_colours_too() -> None:
    codes = [terminal_code(fill_of(style, THEMES["light"])) for style in STYLES]
    assert len(set(codes)) == len(codes)


def test_shades_between_the_first_and_the_last_stage_are_different() -> None:
    fills = {fill_of(Style("F", shade, 4), THEMES["light"]) for shade in range(4)}
    assert len(fills) == 4
