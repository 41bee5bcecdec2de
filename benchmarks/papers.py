"""The headline figures of DAPPLE, SPP, BaPipe and SpecTrain beside ours, with a verdict each.

    python benchmarks/papers.py --write   # all of it: papers/tables.md, and the counts of the page
    python benchmarks/papers.py --quick   # some of it, in a quarter of a minute

It reads nothing outside of the repository. docs/benchmarks/papers.md says what the figures mean.
Afterwards ``docs/pictures/make.py results`` draws the curves of the page.
"""

import argparse
import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HERE = ROOT / "benchmarks" / "papers"
PAGE = ROOT / "docs" / "benchmarks" / "papers.md"
RESULTS, TABLES = HERE / "results.json", HERE / "tables.md"
HEADING = "How many figures come out"
VERDICTS = ("reproduced", "with", "not decided", "not reproduced", "by construction", "-")
"""Columns of the counts; "with" holds every verdict that names another input."""

sys.path[:0] = [str(ROOT / "tests"), str(HERE)]


def results(quick: bool) -> dict[str, Any]:
    """All claims, the rows of table V, and the curves."""
    from bapipe import bapipe_claims
    from batch_curves import batch_curves, curve_claims
    from dapple import planner_claims, winners_rows
    from dapple_scaling import scaling_claims
    from spectrain import spectrain_claims
    from spp import spp_claims

    curves = [] if quick else batch_curves()
    claims = [*planner_claims(quick), *scaling_claims(quick)]
    claims += curve_claims(curves) if curves else []
    for others in (spp_claims, bapipe_claims, spectrain_claims):
        claims += others(quick)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "claims": [claim.to_json() for claim in claims],
        "winners": [] if quick else list(winners_rows()),
        "curves": curves,
    }


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of all claims by the headings above them."""
    from claim import claims_table

    papers = dict.fromkeys(claim["paper"] for claim in found["claims"])
    made = {
        paper: claims_table([claim for claim in found["claims"] if claim["paper"] == paper])
        for paper in papers
    }
    if found["winners"]:
        made["The plans of table V"] = winners_table(found["winners"])
    return made


def winners_table(rows: list[dict[str, Any]]) -> str:
    """Table V and our plans, a row for each model and cluster, columns by size of micro-batches."""
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    heads = " | ".join(f"micro-batches: {rule}" for rule in rules)
    lines = [
        f"| model | cluster | published | {heads} |",
        "|---|---|---" + "|---" * len(rules) + "|",
    ]
    cases = dict.fromkeys((row["model"], row["cluster"], row["published"]) for row in rows)
    for case in cases:
        cells: list[str] = []
        for rule in rules:
            of_rule = [
                row
                for row in rows
                if row["rule"] == rule and (row["model"], row["cluster"]) == case[:2]
            ]
            cells.append(winner_cell(of_rule[0]) if of_rule else "-")
        lines.append(f"| {' | '.join((*case, *cells))} |")
    return "\n".join(lines)


def winner_cell(row: dict[str, Any]) -> str:
    """A plan's form, its split of the layers, and how much faster it is than the published form."""
    split = f", split {row['split']}" if row["split"] else ""
    return f"{row['form']}{split}, {row['over_form']:.2f}x"


def counts_table(claims: list[dict[str, Any]]) -> str:
    """The number of claims of each paper with each verdict."""
    heads = ("reproduced", "with another input", *VERDICTS[2:5], "not published")
    lines = [f"| paper | {' | '.join(heads)} |", "|---" + "|--:" * len(heads) + "|"]
    for paper in dict.fromkeys(claim["paper"] for claim in claims):
        own = [claim["verdict"] for claim in claims if claim["paper"] == paper]
        found = Counter("with" if verdict.startswith("with ") else verdict for verdict in own)
        lines.append(f"| {paper} | {' | '.join(str(found[name]) for name in VERDICTS)} |")
    return "\n".join(lines)


def write_tables(found: dict[str, Any]) -> None:
    """Write all tables, and the counts of the docs; `docs/pictures/make.py` draws the curves."""
    parts = [f"## {heading}\n\n{table}\n" for heading, table in tables(found).items()]
    head = f"# Claims of the papers\n\nWritten by `benchmarks/papers.py` on {found['date']}.\n"
    TABLES.write_text("\n".join([head, *parts]), encoding="utf-8")
    text = with_table(PAGE.read_text(encoding="utf-8"), HEADING, counts_table(found["claims"]))
    PAGE.write_text(text, encoding="utf-8")


def with_table(text: str, heading: str, table: str) -> str:
    """``text`` with ``table`` in the place of the first table below a heading."""
    before, title, after = text.partition(f"\n## {heading}\n")
    lines = after.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return before + title + "\n".join([*lines[:start], table, *lines[end:]])


def main() -> None:
    """Print all tables; with ``--write`` record them too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few claims")
    parser.add_argument("--write", action="store_true", help="write results, tables and page")
    arguments = parser.parse_args()
    if arguments.quick and arguments.write:
        parser.error("--write records all claims: leave out --quick")
    found = results(arguments.quick)
    for heading, table in tables(found).items():
        print(f"\n## {heading}\n\n{table}")
    if arguments.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        write_tables(found)


if __name__ == "__main__":
    main()
