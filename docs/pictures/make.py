"""Make the pictures of README and docs, and print the table of the gallery.

    python docs/pictures/make.py                        # all that need no run
    python docs/pictures/make.py gallery                # only these: gallery, compare, results
    python docs/pictures/make.py --run runs/gpt-text-…  # report.png, from a run of the default job

``results`` are the pictures of what benchmarks have recorded.
"""

import argparse
import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from schedules import table_row, timeline_of

from penstock.advice.compare import Comparisons, best_first, compare_plans
from penstock.cluster.toml_file import find_cluster
from penstock.planners.problem import planning_problem
from penstock.planners.search.search import PLANNERS
from penstock.profile.find import find_profile
from penstock.schedule.registry import FAMILIES
from penstock.timeline.plot import plot_timeline, write_picture

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
COLUMNS = 3

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
"""Colours that the colour-blind can distinguish (Okabe and Ito, 2008, and two darker ones)."""

SPEEDS = {
    "plain": ("data parallelism, no overlap", "#5c6a7a"),
    "overlapped": ("data parallelism, overlapped", "#b3261e"),
    "hybrid": ("hybrid (dapple)", "#0072b2"),
}


def gallery() -> None:
    """Every schedule on the same pipeline."""
    for name in FAMILIES:
        write_picture(plot_timeline(timeline_of(name)), HERE / "schedules" / f"{name}.svg")
        print(table_row(name))


def compare() -> None:
    """All planners on BERT-48."""
    problem = planning_problem(find_profile("bert-48"), find_cluster("dapple-a"), 64)
    found = list(compare_plans(problem, list(PLANNERS), ["auto"], perf_counter))
    ax = Comparisons(best_first(found, list(PLANNERS))).plot()
    ax.set_title("An iteration of BERT-48 on 16 devices, as simulated", loc="left")
    write_picture(ax, HERE / "compare.svg")


def results() -> None:
    """DAPPLE's curves; losses without a flush, and errors of predicted weights."""
    curves = json.loads((BENCHMARKS / "papers" / "results.json").read_text())["curves"]
    figure, panels = panels_for(len(curves), 2.1)
    for ax, found in zip(panels, curves, strict=True):
        draw_speeds(ax, found)
    finish(figure, "dapple-batches")
    cases = json.loads((BENCHMARKS / "convergence" / "results.json").read_text())["cases"]
    figure, panels = panels_for(len(cases), 2.4)
    for ax, case in zip(panels, cases, strict=True):
        draw_losses(ax, case)
    finish(figure, "convergence")
    with_errors = [case for case in cases if any(map(predicts, case["rows"]))]
    figure, panels = panels_for(len(with_errors), 2.2)
    for ax, case in zip(panels, with_errors, strict=True):
        draw_errors(ax, case)
    finish(figure, "prediction-errors")


def panels_for(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with that many panels, in rows of three of this height in inches."""
    rows = -(-count // COLUMNS)
    figure = Figure((11.0, height * rows + 0.6), layout="constrained")
    panels = [figure.add_subplot(rows, COLUMNS, number + 1) for number in range(count)]
    for ax in panels:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#dfe4ea")
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
    return figure, panels


def finish(figure: Figure, name: str) -> None:
    """Explain the colours of all panels below them, and write the picture."""
    known: dict[str, Any] = {}
    for ax in figure.axes:
        handles, labels = ax.get_legend_handles_labels()
        known |= dict(zip(labels, handles, strict=True))
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=5, frameon=False)
    write_picture(figure.axes[0], HERE / f"{name}.svg")


def draw_speeds(ax: Axes, found: dict[str, Any]) -> None:
    """Speed over one device against the batch, of a model on a cluster."""
    for name, (words, colour) in SPEEDS.items():
        ax.plot(found["batches"], found[name], color=colour, label=words)
    ax.set_xscale("log", base=2)
    ax.set_xticks(found["batches"], [f"{batch:,}" for batch in found["batches"]])
    ax.set_ylim(0, max(17.0, *found["hybrid"]))
    ax.set_yticks((0, 4, 8, 12, 16), ("0", "4x", "8x", "12x", "16x"))
    ax.set_title(f"{found['model']}, cluster {found['cluster'].upper()}", loc="left", fontsize=9)


def draw_losses(ax: Axes, case: dict[str, Any]) -> None:
    """Held-out loss against samples, up to twice the loss that training begins to learn from."""
    curves = {row["method"]: row["curve"] for row in case["rows"] if row["curve"]}
    losses = [loss for curve in curves.values() for _, loss, _ in curve if isfinite(loss)]
    low, goal = min(losses), case["goal_loss"]
    for method, curve in curves.items():
        samples, heights, _ = zip(*curve, strict=True)
        ax.plot(samples, heights, color=COLOURS[method], label=method, linewidth=1.3)
    ax.set_ylim(low, low + 3 * (goal - low) if goal > low else max(losses))
    ax.set_xlim(0)
    ax.set_title(case["case"], loc="left", fontsize=9)
    ax.set_xlabel("samples", fontsize=8)
    ax.set_ylabel("held-out loss, nats", fontsize=8)


def predicts(row: dict[str, Any]) -> bool:
    """Whether predictions of the method were followed up."""
    return any(stale for _, stale in row["errors"])


def draw_errors(ax: Axes, case: dict[str, Any]) -> None:
    """Bars of predicted (filled) and stale (hollow) weights for each stage and method."""
    rows = [row for row in case["rows"] if predicts(row)]
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        places = [stage + (number + 0.5) * width - 0.4 for stage in range(len(row["errors"]))]
        predicted, stale = zip(*row["errors"], strict=True)
        colour = COLOURS[row["method"]]
        ax.bar(places, stale, 0.8 * width, fill=False, edgecolor=colour)
        ax.bar(places, predicted, 0.8 * width, color=colour, label=row["method"])
    ax.set_xticks(range(len(rows[0]["errors"])))
    ax.set_title(case["case"], loc="left", fontsize=9)
    ax.set_xlabel("stage", fontsize=8)
    ax.set_ylabel("root mean square error", fontsize=8)


def photograph(page: Path) -> None:
    """Write report.png: what a browser shows of ``page``, to the end of its first section."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        shown = browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5)
        shown.goto(page.resolve().as_uri())
        shown.wait_for_selector("#chart")
        box = shown.locator("section").first.bounding_box()
        assert box is not None
        part = {"x": 0, "y": 0, "width": 1280, "height": box["y"] + box["height"] + 16}
        shown.screenshot(path=HERE / "report.png", full_page=True, clip=part)
        browser.close()


PARTS = {"gallery": gallery, "compare": compare, "results": results}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the parts that are named; without arguments, all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--run", type=Path, help="directory of a run of the default job")
    given = parser.parse_args(arguments)
    if given.run:
        photograph(given.run / "report.html")
    for part in given.parts or ([] if given.run else PARTS):
        PARTS[part]()


if __name__ == "__main__":
    main()
