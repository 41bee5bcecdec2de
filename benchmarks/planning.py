"""All planners on the papers' models and six clusters.

    python benchmarks/planning.py [--quick] [--only model:cluster] [--out results.json]
    python benchmarks/planning.py --every-schedule [--only model:cluster]
    python benchmarks/planning.py --random SEED [--count 60] [--jobs 2] [--out random.json]

Every row (one model on one cluster) runs in a process of its own, one after the other, with a time
limit for each planner; a row that fails is a row that says so. Planning seconds are CPU seconds of
the process, because other work may share the machine. Rows that were asked before and are not
asked now stay in the JSON, each with its own date. Beside the JSON its tables are written as
Markdown. `--random` asks other problems, which are drawn from a seed. The exit code is 1 where
`search` is behind another plan, or a row failed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from time import strftime
from typing import Any

HERE = Path(__file__).parent / "planning"
sys.path.insert(0, str(HERE))

from random_problems import random_row, random_table, random_words  # noqa: E402
from rows import BATCHES, CLUSTERS, every_schedule, run_row  # noqa: E402
from tables import behind, markdown, search_of, summary_of  # noqa: E402

from penstock.machine import processor_name  # noqa: E402

PLANNER_LIMIT_S = 120.0
SCHEDULE_LIMIT_S = 10.0
ROW_LIMIT_S = 1800.0

QUICK = ("bert-48:dapple-a", "vgg-19:dapple-c", "gnmt-16:slow-link", "xlnet-36:unequal")


def run_apart(pair: str, asked: list[str]) -> dict[str, Any]:
    """One row in a process of its own, which is ended after `ROW_LIMIT_S`."""
    model, cluster = pair.split(":")
    command = [sys.executable, __file__, "--row", pair, *asked]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ROW_LIMIT_S, check=False
        )
        if done.returncode == 0:
            return json.loads(done.stdout) | {"machine": machine()}
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"not done within {ROW_LIMIT_S:g} s"
    return {"model": model, "cluster": cluster, "failed": reason, "machine": machine()}


def pairs_of(arguments: argparse.Namespace) -> list[str]:
    """The rows to run, as model:cluster; either may be left out of ``--only``."""
    pairs = [f"{model}:{cluster}" for model in BATCHES for cluster in CLUSTERS]
    if arguments.quick:
        return list(QUICK)
    if arguments.only:
        model, _, cluster = arguments.only.partition(":")
        chosen = [p for p in pairs if p.startswith(f"{model}:" if model else "")]
        return [p for p in chosen if p.endswith(f":{cluster}" if cluster else "")]
    return pairs


def machine() -> dict[str, object]:
    """Machine and date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": strftime("%Y-%m-%d %H:%M"),
        "commit": commit.stdout.strip(),
        "processor": processor_name(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def read_rows(out: Path) -> dict[str, dict[str, Any]]:
    """The rows written before, by model:cluster; those of an older form are left out."""
    if not out.exists():
        return {}
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    known = (row for row in rows if "failed" in row or "equal_memory" in row)
    return {f"{row['model']}:{row['cluster']}": row for row in known}


def write_rows(out: Path, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Write JSON and Markdown, in the order of the models and clusters; the rows in that order."""
    pairs = [f"{model}:{cluster}" for model in BATCHES for cluster in CLUSTERS]
    in_order = [rows[pair] for pair in pairs if pair in rows]
    summary = summary_of(in_order)
    out.write_text(json.dumps({"summary": summary, "rows": in_order}, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(in_order, summary))
    return in_order


def merged(before: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row with the answers that it had before and does not get now."""
    if "every_schedule" in row:
        asked = {"every_schedule": row["every_schedule"] | {"machine": row["machine"]}}
        return before | asked if "answers" in before else before
    return row | {k: before[k] for k in ("every_schedule",) if k in before}


def told(pair: str, row: dict[str, Any]) -> str:
    """A row in a line."""
    if "failed" in row:
        return f"{pair:<24} failed: {row['failed']}"
    if "answers" not in row:
        return f"{pair:<24} was not asked without --every-schedule yet"
    found = search_of(row)
    if found.get("iteration_s") is None:
        return f"{pair:<24} no plan: {found.get('reason', '')}"
    faster = row["faster_than_whole_backwards"] or 0
    beaten = f"  BEHIND {words}" if (words := behind(row)) else ""
    return (
        f"{pair:<24} {1e3 * found['iteration_s']:9.1f} ms  {100 * found['gap']:5.1f} % above  "
        f"{faster:.2f} times as fast as whole backwards  "
        f"search {found['planning_cpu_s']:5.1f} s CPU  row {row['wall_s']:5.1f} s{beaten}"
    )


def ask_random(seed: int, count: int, jobs: int, out: Path) -> int:
    """Ask and write ``count`` random problems; 1 where `search` is behind on any."""
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(jobs) as pool:
        for row in pool.map(partial(random_row, seed), range(count)):
            rows.append(row)
            lines = ",\n".join(map(json.dumps, rows))
            head = f'"seed": {seed}, "machine": {json.dumps(machine())}'
            out.write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
            print(random_words(row), flush=True)
    print("\n".join(random_table(rows)))
    return int(any(" BEHIND " in random_words(row) for row in rows))


def main() -> int:
    """Plan the chosen rows; write JSON and Markdown after every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four rows")
    parser.add_argument("--only", default="", metavar="MODEL:CLUSTER", help="either may be empty")
    parser.add_argument("--planner-limit", type=float, default=PLANNER_LIMIT_S, metavar="S")
    parser.add_argument(
        "--every-schedule",
        action="store_true",
        help=f"the published planners under each schedule, {SCHEDULE_LIMIT_S:g} s for each",
    )
    parser.add_argument("--random", type=int, metavar="SEED", help="problems drawn from a seed")
    parser.add_argument("--count", type=int, default=60, help="how many of them")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        model, cluster = arguments.row.split(":")
        if arguments.every_schedule:
            print(json.dumps(every_schedule(model, cluster, SCHEDULE_LIMIT_S)))
        else:
            print(json.dumps(run_row(model, cluster, arguments.planner_limit)))
        return 0
    if arguments.random is not None:
        out = arguments.out or HERE / "random.json"
        return ask_random(arguments.random, arguments.count, arguments.jobs, out)
    out = arguments.out or HERE / "results.json"
    asked = ["--planner-limit", str(arguments.planner_limit)]
    asked += ["--every-schedule"] if arguments.every_schedule else []
    for pair in pairs_of(arguments):
        row = run_apart(pair, asked)
        if arguments.every_schedule and "failed" in row:
            print(told(pair, row), flush=True)
            continue
        # Others may have written rows meanwhile.
        rows = read_rows(out)
        rows[pair] = merged(rows.get(pair, {}), row)
        write_rows(out, rows)
        print(told(pair, rows[pair]), flush=True)
    summary = summary_of(list(read_rows(out).values()))
    print(json.dumps(summary, indent=1))
    return 1 if summary["failed"] or summary["search_behind"] else 0


if __name__ == "__main__":
    sys.exit(main())
