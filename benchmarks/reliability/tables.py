"""The tables of docs/benchmarks/models.md, from the recorded results.

python benchmarks/reliability/tables.py [--write]
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "benchmarks" / "models.md"


def faults_table(faults: Sequence[Mapping[str, Any]]) -> str:
    """A row for each kind of fault: what became of the runs, and how quickly they ended."""
    rows = [
        "| fault | runs | resumed | started again | went on | ended within | flaws |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in sorted({fault["kind"] for fault in faults}):
        own = [fault for fault in faults if fault["kind"] == kind]
        outcomes = Counter(outcome_of(fault) for fault in own)
        ended = [fault["ended_s"] for fault in own if outcome_of(fault) != "went on"]
        within = f"{max(ended):.0f} s" if ended else "-"
        counts = [outcomes[name] for name in ("resumed", "started again", "went on")]
        flaws = sum(bool(fault["flaws"]) for fault in own)
        rows.append(
            f"| {kind} | {len(own)} | {' | '.join(map(str, counts))} | {within} | {flaws} |"
        )
    return "\n".join(rows)


def soak_table(trends: Sequence[Mapping[str, Any]]) -> str:
    """A row for each figure: its mean, its largest value, and how it changes in an hour."""
    rows = [
        "| figure | mean | largest | change in an hour | 95 % interval | bound |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for trend in trends:
        amount = in_megabytes if trend["name"].endswith("_bytes") else in_units
        mean, largest, bound = (amount(trend[key]) for key in ("mean", "largest", "bound"))
        change, low, high = (amount(trend[key]) for key in ("per_hour", "low", "high"))
        name = trend["name"].replace("_", " ")
        rows.append(f"| {name} | {mean} | {largest} | {change} | {low} to {high} | {bound} |")
    return "\n".join(rows)


def in_megabytes(count: float) -> str:
    """Bytes in MB."""
    return f"{count / 1e6:.1f} MB"


def in_units(count: float) -> str:
    """A count."""
    return f"{count:.1f}"


def outcome_of(fault: Mapping[str, Any]) -> str:
    """The column in which a fault is counted."""
    outcome = fault["outcome"]
    if outcome.startswith("resumed"):
        return "resumed"
    return outcome if outcome == "started again" else "went on"


def elastic_table(found: Mapping[str, Any]) -> str:
    """A row for each loss and each return: seconds until the next step, and what they go to."""
    rows = [
        "| event | load | ranks ended | started again | first step | in all | losses apart |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    words = {"worker": "a rank is killed", "host": "a host is lost", "back": "the host is back"}
    for kind, event in words.items():
        for run in found[kind]:
            keys = ("stopped_s", "started_s", "stepped_s", "all_s")
            seconds = " | ".join(f"{run[key]:.1f} s" for key in keys)
            apart = f"{run['largest_difference_of_losses']:.0e}"
            rows.append(f"| {event} | {run['load']:.0f} | {seconds} | {apart} |")
    return "\n".join(rows)


def replaced(text: str, table: str) -> str:
    """``text`` with ``table`` in the place of the one that has the same first line, if any."""
    lines = text.splitlines()
    if table.splitlines()[0] not in lines:
        return text
    start = end = lines.index(table.splitlines()[0])
    while lines[end].startswith("|"):
        end += 1
    return "\n".join([*lines[:start], table, *lines[end:], ""])


def main() -> None:
    """Print the tables; with ``--write`` put them into the page."""
    faults = results("chaos")["faults"]
    tables = [
        faults_table(faults),
        elastic_table(results("elastic")),
        *([soak_table(results("soak")["trends"])] if (HERE / "soak.json").exists() else []),
    ]
    print("\n\n".join(tables))
    if "--write" in sys.argv:
        text = PAGE.read_text()
        for table in tables:
            text = replaced(text, table)
        PAGE.write_text(text)


def results(name: str) -> Any:
    """The recorded results of a script."""
    return json.loads((HERE / f"{name}.json").read_text())


if __name__ == "__main__":
    main()
