"""The curves of every case, and how far predictions missed, as one SVG picture each.

python benchmarks/convergence/picture.py benchmarks/convergence/results.json docs/pictures
"""

import argparse
import json
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

__all__ = ["curves_picture", "errors_picture"]

COLOURS = {
    "synchronous": "#000000",
    "vanilla": "#d55e00",
    "pipedream": "#e69f00",
    "2bw": "#999999",
    "spectrain": "#0072b2",
    "spectrain-published": "#5b3a9b",
    "spectrain-measured": "#8c6d31",
    "spectrain-v2": "#56b4e9",
    "xpipe": "#009e73",
    "pipeoptim": "#cc79a7",
}
"""Colours that the colour-blind can tell apart (Okabe and Ito, 2008, and two darker ones)."""

LEGEND_COLUMNS = 5

WIDTH, HEIGHT, COLUMNS = 330, 210, 3
LEFT, RIGHT, TOP, BOTTOM = 62, 8, 26, 34
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#222}.title{font-weight:600}"
    ".axis{stroke:#888}.grid{stroke:#e4e4e4}.curve{fill:none;stroke-width:1.6}"
)


def curves_picture(cases: list[dict[str, Any]]) -> str:
    """Held-out loss against samples, a panel for each case, a curve for each method."""
    panels = [curves_panel(case, *place(number)) for number, case in enumerate(cases)]
    return picture(panels, len(cases), [row["method"] for case in cases for row in case["rows"]])


def errors_picture(cases: list[dict[str, Any]]) -> str:
    """Root mean square of predicted (filled) and stale (hollow) weights, stage by stage."""
    with_errors = [
        case for case in cases if any(row["errors"] and row["errors"][0][1] for row in case["rows"])
    ]
    panels = [errors_panel(case, *place(number)) for number, case in enumerate(with_errors)]
    methods = [row["method"] for case in with_errors for row in case["rows"] if predicts(row)]
    return picture(panels, len(with_errors), methods)


def place(number: int) -> tuple[float, float]:
    """The upper left corner of a panel."""
    return WIDTH * (number % COLUMNS), HEIGHT * (number // COLUMNS)


def predicts(row: dict[str, Any]) -> bool:
    """Whether predictions of the method were followed up."""
    return bool(row["errors"]) and any(stale for _, stale in row["errors"])


def picture(panels: list[str], count: int, methods: list[str]) -> str:
    """The panels, and what the colours mean below them."""
    rows = -(-count // COLUMNS)
    legend: list[str] = []
    for number, method in enumerate(m for m in COLOURS if m in methods):
        line, column = divmod(number, LEGEND_COLUMNS)
        x, y = 20 + 190 * column, rows * HEIGHT + 18 + 16 * line
        legend.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}" stroke="{COLOURS[method]}" '
            f'stroke-width="3"/><text x="{x + 23}" y="{y}">{method}</text>'
        )
    width, height = WIDTH * COLUMNS, rows * HEIGHT + 46
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>'
        f"{''.join(panels)}{''.join(legend)}</svg>\n"
    )


def frame(title: str, x: float, y: float, low: float, high: float, words: tuple[str, str]) -> str:
    """Title, axes and three marks up the side."""
    bottom, right = y + HEIGHT - BOTTOM, x + WIDTH - RIGHT
    parts = [f'<text class="title" x="{x + LEFT}" y="{y + 16}">{escape(title)}</text>']
    for step in range(3):
        value = low + (high - low) * step / 2
        at = bottom - (HEIGHT - TOP - BOTTOM) * step / 2
        parts.append(
            f'<line class="grid" x1="{x + LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
            f'<text x="{x + LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{value:.2g}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{x + LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
        f'<text x="{right}" y="{bottom + 26}" text-anchor="end">{words[0]}</text>'
        f'<text x="{x + LEFT}" y="{bottom + 26}">{words[1]}</text>'
    )
    return "".join(parts)


def curves_panel(case: dict[str, Any], x: float, y: float) -> str:
    """One case: its curves up to twice the loss that training begins to learn from."""
    curves = {row["method"]: row["curve"] for row in case["rows"] if row["curve"]}
    losses = [loss for curve in curves.values() for _, loss, _ in curve if isfinite(loss)]
    low = min(losses)
    high = low + 3 * (case["goal_loss"] - low) if case["goal_loss"] > low else max(losses)
    most = max(curve[-1][0] for curve in curves.values())
    across = (WIDTH - LEFT - RIGHT) / most
    up = (HEIGHT - TOP - BOTTOM) / (high - low)
    bottom = y + HEIGHT - BOTTOM
    parts = [frame(case["case"], x, y, low, high, (f"{most:,} samples", "held-out loss, nats"))]
    for method, curve in curves.items():
        points = " ".join(
            f"{x + LEFT + samples * across:.1f},{bottom - (min(loss, high) - low) * up:.1f}"
            for samples, loss, _ in curve
            if isfinite(loss)
        )
        parts.append(
            f'<polyline class="curve" stroke="{COLOURS[method]}" points="{points}">'
            f"<title>{method}</title></polyline>"
        )
    return "".join(parts)


def errors_panel(case: dict[str, Any], x: float, y: float) -> str:
    """One case: pairs of bars for every stage and method that predicts."""
    rows = [row for row in case["rows"] if predicts(row)]
    stages = len(rows[0]["errors"])
    high = max(stale for row in rows for _, stale in row["errors"])
    bottom = y + HEIGHT - BOTTOM
    up = (HEIGHT - TOP - BOTTOM) / high
    room = (WIDTH - LEFT - RIGHT) / stages
    each = (room - 8) / len(rows)
    parts = [frame(case["case"], x, y, 0.0, high, ("", "root mean square error, by stage"))]
    for stage in range(stages):
        for number, row in enumerate(rows):
            predicted, stale = row["errors"][stage]
            colour, at = COLOURS[row["method"]], x + LEFT + stage * room + 4 + number * each
            parts.append(
                f'<rect x="{at:.1f}" y="{bottom - stale * up:.1f}" width="{each - 2:.1f}" '
                f'height="{stale * up:.1f}" fill="none" stroke="{colour}"/>'
                f'<rect x="{at:.1f}" y="{bottom - predicted * up:.1f}" width="{each - 2:.1f}" '
                f'height="{predicted * up:.1f}" fill="{colour}"><title>{row["method"]}, stage '
                f"{stage}: {predicted:.2g} of {stale:.2g}</title></rect>"
            )
        middle = x + LEFT + (stage + 0.5) * room
        parts.append(
            f'<text x="{middle:.1f}" y="{bottom + 13}" text-anchor="middle">{stage}</text>'
        )
    return "".join(parts)


def main() -> None:
    """Draw both pictures of a results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    cases = json.loads(arguments.results.read_text())["cases"]
    for name, draw in (("convergence", curves_picture), ("prediction-errors", errors_picture)):
        (arguments.directory / f"{name}.svg").write_text(draw(cases))


if __name__ == "__main__":
    main()
