"""Write the tables of the forty runs, quiet and beside a busy loop, into README.md.

python benchmarks/prediction/forty_table.py
"""

import json
import re
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
RESULTS = {"Quiet": "forty_runs.json", "Beside a busy loop": "loaded.json"}
"""The file of each section."""

SETTINGS = (
    "one rank",
    "2 ranks, `1f1b`",
    "2 ranks, the planner's choice",
    "2 replicas of one stage",
    "3 ranks on 2 cores, the planner's choice",
    "4 ranks on 2 cores, `1f1b`",
    "2 hosts of 1 rank, 1 Gb/s, the planner's choice",
    "2 hosts of 2 ranks on 1 core, 1 Gb/s, the planner's choice",
)


def table(document: dict[str, Any]) -> list[str]:
    """The errors: a line for each setting, a column for each model."""
    models = list(dict.fromkeys(row["model"] for row in document["rows"]))
    lines = ["| setting | " + " | ".join(models) + " |", "|---" + "|--:" * len(models) + "|"]
    for place, setting in enumerate(SETTINGS):
        own = [[r for r in document["rows"] if r["model"] == model][place] for model in models]
        cells = [f"{1e3 * r['measured_s']:,.0f} ms, {100 * r['error']:+.1f} %" for r in own]
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return lines


def frame(document: dict[str, Any]) -> str:
    """Machine and date of the runs."""
    others = max(row["others_cores"] for row in document["rows"])
    return (
        f"torch {document['torch']}, {document['cores']} cores of an {document['machine']}, one "
        f"run of each, {document['date']}, other programs at most {others:g} cores."
    )


def words(document: dict[str, Any]) -> str:
    """Errors of the predictions, and the machine's noise."""
    errors = sorted(abs(row["error"]) for row in document["rows"])
    within = sum(error <= 0.12 for error in errors)
    first = {row["model"]: row for row in reversed(document["rows"])}
    noise = [abs(r["measured_s"] / first[r["model"]]["measured_s"] - 1) for r in document["again"]]
    bias = mean(row["error"] for row in document["rows"])
    return (
        f"The median error is {100 * median(errors):.1f} %, the worst {100 * errors[-1]:.1f} %, "
        f"the mean {100 * bias:+.1f} %; {within} of {len(errors)} are within 12 %. The same plan "
        f"trained again took up to {100 * max(noise):.1f} % more or less time."
    )


def main() -> None:
    """Write what was recorded."""
    page = PAGE.read_text(encoding="utf-8")
    for heading, name in RESULTS.items():
        if (HERE / name).exists():
            document = json.loads((HERE / name).read_text(encoding="utf-8"))
            lines = [*table(document), "", frame(document), "", words(document)]
            section = "\n".join(["", f"## {heading}", "", *lines, "", "## "])
            page = re.sub(rf"(?s)\n## {heading}\n.*?\n## ", section, page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
