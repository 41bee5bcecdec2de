"""Published runs on up to 16,384 GPUs beside predictions, and how long planning for them takes.

    python benchmarks/largest.py --quick           # two small runs, in seconds
    python benchmarks/largest.py --write           # all of them: results and tables of the page
    python benchmarks/largest.py --plan --write    # planning too; some ten minutes

The runs and their sources are in largest/published.toml. docs/benchmarks/predictions.md says what
the figures mean.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from statistics import correlation, mean, median
from typing import Any

ROOT = Path(__file__).parents[1]
HERE = ROOT / "benchmarks" / "largest"
PAGE = ROOT / "docs" / "benchmarks" / "predictions.md"
RESULTS = HERE / "results.json"
sys.path.insert(0, str(HERE))

WITHIN = 0.15
"""Predictions that are no farther from the published time count."""

MOST_GPUS_OF_SMALL = 1000
FEWEST_LAYOUTS = 4

QUICK_RUNS = 2


def run_results(quick: bool) -> list[dict[str, Any]]:
    """Every run with its prediction, and the share that the first run of its source would set."""
    from published_runs import fits, fitted_share, predicted, published_runs

    runs = list(published_runs())[: QUICK_RUNS if quick else None]
    first = {run.source: run for run in reversed(runs)}
    return [
        {
            "source": run.source,
            "group": run.group,
            "name": run.name,
            "gpus": run.gpus,
            "devices": run.gpus // run.tensor,
            "plan": f"{run.tensor} x {run.pipeline} x {run.replicas}, {run.schedule}"
            + (f" in {run.chunks}" if run.chunks > 1 else ""),
            "micro_batch": run.micro_batch,
            "published_s": run.seconds,
            "predicted_s": prediction.iteration_s,
            "fits": fits(run, prediction),
            "judges": not run.sets and run.source != "deepseek-v3",
            "sets": run.sets,
            "overlaps": run.overlaps,
        }
        | ({"share": fitted_share(run)} if run == first[run.source] else {})
        for run in runs
        for prediction in [predicted(run)]
    ]


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of the page by the headings above them."""
    made = {
        "By source": sources_table(found["runs"]),
        "Which layout is chosen": layouts_table(found["runs"]),
    }
    if found.get("planning"):
        made["Planning"] = planning_table(found["planning"])
    return made


def table_of(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; columns whose heads begin with a hyphen are numbers."""
    names = (head.removeprefix("-") for head in heads)
    rule = ("--:" if head.startswith("-") else "---" for head in heads)
    lines = [f"| {' | '.join(names)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def by_source(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs that ended, by their sources."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if run["published_s"]:
            found.setdefault(run["source"], []).append(run)
    return found


def sources_table(runs: list[dict[str, Any]]) -> str:
    """The errors of each source."""
    heads = ("source", "judges", "messages beside compute", "-runs", "-mean error", "-mean size")
    return table_of(
        (*heads, "-within 15 %", "-first run's share"),
        (
            (
                source,
                "yes" if own[0]["judges"] else "no",
                "yes" if own[0]["overlaps"] else "no",
                f"{len(own)}",
                f"{100 * mean(map(error_of, own)):+.1f} %",
                f"{100 * mean(abs(error_of(run)) for run in own):.1f} %",
                f"{sum(map(is_within, own))}",
                f"{own[0]['share']:.2f}",
            )
            for source, own in by_source(runs).items()
        ),
    )


def runs_table(runs: list[dict[str, Any]]) -> str:
    """A row for each run; bold where the prediction is within the limit."""
    return table_of(
        ("source", "model", "-GPUs", "plan", "-published", "-predicted", "-error"),
        (
            (
                run["source"],
                run["name"],
                f"{run['gpus']:,}",
                run["plan"],
                f"{run['published_s']:.2f} s",
                f"{run['predicted_s']:.2f} s",
                f"**{error}**" if run["judges"] and is_within(run) else error,
            )
            for own in by_source(runs).values()
            for run in own
            for error in [f"{100 * error_of(run):+.1f} %"]
        ),
    )


def layout_groups(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Layouts of one model on one machine, where there are enough that ran."""
    ran = [run for run in runs if run["group"] and run["published_s"]]
    groups = {
        run["group"]: [other for other in ran if other["group"] == run["group"]] for run in ran
    }
    return {name: own for name, own in groups.items() if len(own) >= FEWEST_LAYOUTS}


def rank_correlation(layouts: list[dict[str, Any]]) -> float:
    """Spearman's, between published and predicted times."""
    published, predicted = (
        [sorted(times).index(time) for time in times]
        for times in ([run[key] for run in layouts] for key in ("published_s", "predicted_s"))
    )
    return correlation(published, predicted)


def chosen(layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """The layout that is predicted to be the fastest."""
    return min(layouts, key=lambda run: run["predicted_s"])


def regret(layouts: list[dict[str, Any]]) -> float:
    """By how much the layout that is chosen was slower than the best."""
    return chosen(layouts)["published_s"] / min(run["published_s"] for run in layouts) - 1


def layouts_table(runs: list[dict[str, Any]]) -> str:
    """The ranks of the layouts of each model."""

    def words(run: dict[str, Any]) -> str:
        return f"{run['plan'].partition(',')[0]}, {run['micro_batch']}"

    return table_of(
        ("group", "-layouts", "-rank correlation", "chosen", "fastest", "-slower by"),
        (
            (
                name,
                f"{len(own)}",
                f"{rank_correlation(own):+.2f}",
                words(chosen(own)),
                words(min(own, key=lambda run: run["published_s"])),
                f"{100 * regret(own):.1f} %",
            )
            for name, own in layout_groups(runs).items()
        ),
    )


def error_of(run: dict[str, Any]) -> float:
    """The prediction's error, relative to the published time."""
    return run["predicted_s"] / run["published_s"] - 1


def is_within(run: dict[str, Any]) -> bool:
    """Return whether the prediction is near enough."""
    return abs(error_of(run)) <= WITHIN


def counts(runs: list[dict[str, Any]]) -> str:
    """The number of runs within the limit, of those that judge, in words."""
    asked = [run for run in runs if run["judges"] and run["published_s"]]
    large = [run for run in asked if run["gpus"] > MOST_GPUS_OF_SMALL]
    return (
        f"{sum(map(is_within, asked))} of {len(asked)} predictions are within 15 % of the "
        f"published time, {sum(map(is_within, large))} of the {len(large)} for 1,024 GPUs and more"
    )


def layout_counts(runs: list[dict[str, Any]]) -> str:
    """The quality of layouts' ranks, and how often memory is right, in words."""
    groups = layout_groups(runs).values()
    lost = [regret(own) for own in groups]
    full = [run for run in runs if not run["published_s"]]
    ran = [run for run in runs if run["published_s"] and run["source"] != "deepseek-v3"]
    return (
        f"In {len(groups)} groups of layouts the rank correlation is "
        f"{median(map(rank_correlation, groups)):.2f} in the median. The layout predicted to be "
        f"fastest is {100 * median(lost):.1f} % slower than the best in the median, and "
        f"{100 * max(lost):.1f} % at worst. Said to fit: {sum(run['fits'] for run in full)} of "
        f"{len(full)} layouts that ran out of memory, and {sum(run['fits'] for run in ran)} of "
        f"{len(ran)} that ran"
    )


def planning_table(rows: list[dict[str, Any]]) -> str:
    """Seconds of each planner, and the time of its plan."""
    lines = [
        "| run | devices | planner | CPU | peak memory | its plan | predicted | over published |",
        "|---|--:|---|--:|--:|---|--:|--:|",
    ]
    for row in rows:
        asked = row["run"], f"{row['devices']:,}", f"`{row['planner']}`"
        took = f"{row['cpu_s']:.1f} s" if "cpu_s" in row else "-"
        memory = f"{row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else "-"
        answer = (row.get("failed", ""), "-", "-")
        if "failed" not in row:
            ratio = f"{row['planned_s'] / row['published_plan_s']:.2f}"
            answer = (row["plan"], f"{row['planned_s']:.2f} s", ratio)
        lines.append(f"| {' | '.join((*asked, took, memory, *answer))} |")
    return "\n".join(lines)


def with_table(text: str, heading: str, table: str) -> str:
    """``text`` with ``table`` in the place of the first table below a heading."""
    before, title, after = text.partition(f"\n## {heading}\n")
    lines = after.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return before + title + "\n".join([*lines[:start], table, *lines[end:]])


def sources() -> str:
    """The list of sources: title, and where the plan comes from."""
    read = tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8"))
    return "\n".join(f"- *{key}*: {one['title']}; {one['plan']}." for key, one in read.items())


def main() -> None:
    """Print all tables; with ``--write`` record them too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two small runs")
    parser.add_argument("--plan", action="store_true", help="plan for the largest runs as well")
    parser.add_argument("--write", action="store_true", help="write results and page")
    arguments = parser.parse_args()
    if arguments.quick and arguments.write:
        parser.error("--write records all runs: leave out --quick")
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    found = before | {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "runs": run_results(arguments.quick),
    }
    if arguments.plan:
        from planning_times import planning_rows

        found["planning"] = planning_rows()
    print(runs_table(found["runs"]))
    if not arguments.quick:
        for heading, table in tables(found).items():
            print(f"\n## {heading}\n\n{table}")
    print(f"\n{counts(found['runs'])}.")
    if not arguments.quick:
        print(f"\n{layout_counts(found['runs'])}.\n\n{sources()}")
    if arguments.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        text = PAGE.read_text(encoding="utf-8")
        for heading, table in tables(found).items():
            text = with_table(text, heading, table)
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
