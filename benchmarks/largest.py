"""Published runs on up to 16,384 GPUs beside predictions, and how long planning for them takes.

    python benchmarks/largest.py --quick           # two small runs, in seconds
    python benchmarks/largest.py --write           # all of them: results and tables of the page
    python benchmarks/largest.py --plan --write    # planning too; some ten minutes

The runs and their sources are in largest/published.toml. docs/benchmarks/largest.md says what the
figures mean.
"""

import argparse
import json
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HERE = ROOT / "benchmarks" / "largest"
PAGE = ROOT / "docs" / "benchmarks" / "largest.md"
RESULTS = HERE / "results.json"
sys.path.insert(0, str(HERE))

WITHIN = 0.15
"""Predictions that are no farther from the published time count."""

MOST_GPUS_OF_SMALL = 1000
QUICK_RUNS = 2


def run_results(quick: bool) -> list[dict[str, Any]]:
    """Every run with its prediction, and that with the share of its source's first run."""
    from published_runs import fitted_share, predicted, published_runs

    runs = list(published_runs())[: QUICK_RUNS if quick else None]
    first = {run.source: run for run in reversed(runs)}
    shares = {source: fitted_share(run) for source, run in first.items()}
    return [
        {
            "source": run.source,
            "name": run.name,
            "gpus": run.gpus,
            "devices": run.gpus // run.tensor,
            "plan": f"{run.tensor} x {run.pipeline} x {run.replicas}, {run.schedule}"
            + (f" in {run.chunks}" if run.chunks > 1 else ""),
            "published_s": run.seconds,
            "predicted_s": predicted(run).iteration_s,
            "sets_share": run == first[run.source],
            "share": shares[run.source],
            "with_share_s": predicted(run, shares[run.source]).iteration_s,
        }
        for run in runs
    ]


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of the page by the headings above them."""
    made = {"Predicted and published": runs_table(found["runs"])}
    if found.get("planning"):
        made["Planning"] = planning_table(found["planning"])
    return made


def runs_table(runs: list[dict[str, Any]]) -> str:
    """A row for each run; bold where the prediction is within the limit."""
    lines = [
        "| source | model | GPUs | plan | published | predicted | error | source's own share |",
        "|---|---|--:|---|--:|--:|--:|--:|",
    ]
    for run in runs:
        error = f"{100 * error_of(run):+.1f} %"
        fitted = f"{100 * (run['with_share_s'] / run['published_s'] - 1):+.1f} %"
        cells = (
            run["source"],
            run["name"],
            f"{run['gpus']:,}",
            run["plan"],
            f"{run['published_s']:.2f} s",
            f"{run['predicted_s']:.2f} s",
            f"**{error}**" if counted([run]) and is_within(run) else error,
            f"{run['share']:.2f} is set" if run["sets_share"] else fitted,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def error_of(run: dict[str, Any]) -> float:
    """The prediction's error, relative to the published time."""
    return run["predicted_s"] / run["published_s"] - 1


def is_within(run: dict[str, Any]) -> bool:
    """Whether the prediction is near enough."""
    return abs(error_of(run)) <= WITHIN


def counted(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs that are predicted; DeepSeek-V3's rates are not known."""
    return [run for run in runs if run["source"] != "deepseek-v3"]


def counts(runs: list[dict[str, Any]]) -> str:
    """How many runs are within the limit, in words."""
    asked = counted(runs)
    large = [run for run in asked if run["gpus"] > MOST_GPUS_OF_SMALL]
    return (
        f"{sum(map(is_within, asked))} of {len(asked)} predictions are within 15 % of the "
        f"published time, {sum(map(is_within, large))} of the {len(large)} for 1,024 GPUs and more"
    )


def planning_table(rows: list[dict[str, Any]]) -> str:
    """How long each planner took, and the time of its plan."""
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
    for heading, table in tables(found).items():
        print(f"\n## {heading}\n\n{table}")
    print(f"\n{counts(found['runs'])}.\n\n{sources()}")
    if arguments.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        text = PAGE.read_text(encoding="utf-8")
        for heading, table in tables(found).items():
            text = with_table(text, heading, table)
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
