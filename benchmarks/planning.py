"""All planners on the papers' models and six clusters, and the speed of whole planning processes.

    python benchmarks/planning.py [--quick] [--only model:cluster] [--out results.json]
    python benchmarks/planning.py --speed [--out speed.json]

Every row (one model on one cluster) runs in a process of its own, one after the other, with a time
limit for each planner; a row that fails is a row that says so. Planning seconds are CPU seconds of
the process, because other work may share the machine. Beside the JSON a table is written as
Markdown. The exit code is 1 where `search` is behind another planner, or a row failed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, strftime

from penstock.cluster.cluster import Cluster
from penstock.cluster.presets import find_cluster
from penstock.planning.assessment import PlannedPipeline
from penstock.planning.comparison import AUTO, Comparison, compare_plans
from penstock.planning.explanation import explain_plan, explanation_words
from penstock.planning.questions import planning_problem
from penstock.profile.find import find_profile
from penstock.search.registry import PLANNERS

HERE = Path(__file__).parent / "planning"
PLANNER_LIMIT_S = 90.0
ROW_LIMIT_S = 600.0
EXPLAINED_GAP = 0.05
ROUNDING = 1e-9

BATCHES = {
    "bert-48": 64,
    "xlnet-36": 128,
    "amoebanet-36": 128,
    "gnmt-16": 1024,
    "vgg-19": 2048,
    "resnet-50": 2048,
    "vgg-16": 2048,
    "inception-v3": 2048,
    "gnmt-8": 1024,
    "bert-32": 64,
}
"""Samples of an iteration: the papers' where they give one."""

CLUSTERS = ("dapple-a", "dapple-b", "dapple-c", "slow-link", "unequal", "graph")
QUICK = ("bert-48:dapple-a", "vgg-19:dapple-c", "gnmt-16:slow-link", "xlnet-36:unequal")


@dataclass(frozen=True)
class Answer:
    """What one planner made of one problem."""

    planner: str
    iteration_s: float | None
    gap: float | None
    planning_cpu_s: float
    schedule: str = ""
    stages: str = ""
    micro_batches: int = 0
    reason: str = ""


def cluster_of(name: str) -> Cluster:
    """A cluster of the benchmark: a preset, or one that differs from a preset in one respect."""
    match name:
        case "slow-link":
            cluster = find_cluster("dapple-c")
            hosts = tuple(replace(h, port_bytes_per_s=1e9 / 8) for h in cluster.hosts)
            return Cluster("slow-link: dapple-c with 1 Gb/s", hosts, cluster.links)
        case "unequal":
            return find_cluster("mixed-gpus")
        case "graph":
            return find_cluster("graph-8")
        case _:
            return find_cluster(name)


def run_row(model: str, cluster: str, limit_s: float) -> dict[str, object]:
    """All planners on one problem, in this process."""
    # The papers' planners fill devices, so all memory is theirs.
    problem = planning_problem(
        find_profile(model), cluster_of(cluster), BATCHES[model], memory_reserve=0.0
    )
    start_s, answers = perf_counter(), list[Answer]()
    bound_s, argument, explanation = 0.0, "", list[str]()
    for found in compare_plans(problem, list(PLANNERS), [AUTO], process_time, limit_s=limit_s):
        answers.append(answer_of(found))
        planned = found.outcome if found.planner == "search" else None
        if isinstance(planned, PlannedPipeline) and planned.gap > EXPLAINED_GAP:
            explanation = explanation_words(explain_plan(planned, problem))
        values = found.to_json()
        if "iteration_s" in values:
            bound_s, argument = values["lower_bound_s"], values["bound_argument"]
    times = {a.planner: a.iteration_s for a in answers if a.iteration_s is not None}
    best_s = min(times.values(), default=None)
    return {
        "model": model,
        "cluster": cluster,
        "batch": problem.global_batch,
        "devices": len(problem.cluster.devices),
        "bound_s": bound_s,
        "bound_argument": argument,
        "search_is_best": best_s is None
        or ("search" in times and times["search"] <= best_s * (1 + ROUNDING)),
        "explanation": explanation,
        "wall_s": perf_counter() - start_s,
        "answers": [vars(answer) for answer in answers],
    }


def answer_of(found: Comparison) -> Answer:
    """A comparison in the figures that are kept."""
    values = found.to_json()
    if "iteration_s" not in values:
        reason = str(values.get("infeasible") or values.get("failed"))
        return Answer(found.planner, None, None, found.planning_s, reason=reason)
    stages = [f"{s['layers'][1] - s['layers'][0]}x{len(s['devices'])}" for s in values["stages"]]
    return Answer(
        found.planner,
        values["iteration_s"],
        values["gap"],
        found.planning_s,
        values["schedule"],
        ":".join(stages),
        values["micro_batches"],
    )


def run_apart(pair: str, limit_s: float) -> dict[str, object]:
    """One row in a process of its own, which is ended after `ROW_LIMIT_S`."""
    model, cluster = pair.split(":")
    command = [sys.executable, __file__, "--row", pair, "--planner-limit", str(limit_s)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ROW_LIMIT_S, check=False
        )
        if done.returncode == 0:
            return json.loads(done.stdout)
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"not done within {ROW_LIMIT_S:g} s"
    return {"model": model, "cluster": cluster, "failed": reason}


def summary_of(rows: list[dict]) -> dict[str, object]:
    """What the rows show together."""
    done = [row for row in rows if "failed" not in row]
    gaps = sorted(g for row in done if (g := search_of(row).get("gap")) is not None)
    return {
        "rows": len(rows),
        "failed": [f"{r['model']}:{r['cluster']}" for r in rows if "failed" in r],
        "search_behind": [f"{r['model']}:{r['cluster']}" for r in done if not r["search_is_best"]],
        "gap_median": median(gaps) if gaps else None,
        "gap_worst": gaps[-1] if gaps else None,
        "rows_above_5_percent": sum(gap > EXPLAINED_GAP for gap in gaps),
    }


def search_of(row: dict) -> dict:
    """The default planner's answer of a row."""
    return next((a for a in row["answers"] if a["planner"] == "search"), {})


def markdown(rows: list[dict], summary: dict[str, object]) -> str:
    """The rows as tables: search against its bound, then every planner against search."""
    planners = [name for name in PLANNERS if name != "search"]
    lines = ["| model | cluster | search | gap | CPU | bound |", "|---|---|---|---|---|---|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['model']} | {row['cluster']} | failed: {row['failed']} | | | |")
            continue
        found = search_of(row)
        if found.get("iteration_s") is None:
            figures = f"no plan: {found.get('reason', '')} | | "
        else:
            figures = f"{1e3 * found['iteration_s']:.1f} ms | {100 * found['gap']:.1f} % | "
        lines.append(
            f"| {row['model']} | {row['cluster']} | {figures}"
            f"{found.get('planning_cpu_s', 0):.1f} s | {row['bound_argument']} |"
        )
    lines += ["", "Iteration time relative to `search` (a dash: no plan):", ""]
    lines += [f"| model | cluster | {' | '.join(planners)} |", "|---|---" + "|---" * len(planners)]
    lines[-1] += "|"
    for row in rows:
        if "failed" in row:
            continue
        times = {a["planner"]: a["iteration_s"] for a in row["answers"]}
        mine = times.get("search")
        cells = [f"{times[p] / mine:.2f}" if mine and times.get(p) else "-" for p in planners]
        lines.append(f"| {row['model']} | {row['cluster']} | {' | '.join(cells)} |")
    lines += ["", f"Rows more than {100 * EXPLAINED_GAP:.0f} % above the bound:", ""]
    for row in rows:
        if row.get("explanation"):
            words = " ".join(row["explanation"])
            place = f"{row['model']} on {row['cluster']}"
            lines.append(f"- {place}. The bound: {row['bound_argument']}. The plan: {words}")
    lines += ["", *(f"- {key}: {value}" for key, value in summary.items())]
    return "\n".join(lines) + "\n"


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
    """Where and when."""
    return {
        "date": strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """Run what is asked for; write JSON and Markdown after every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four rows")
    parser.add_argument("--only", default="", metavar="MODEL:CLUSTER", help="either may be empty")
    parser.add_argument("--planner-limit", type=float, default=PLANNER_LIMIT_S, metavar="S")
    parser.add_argument("--speed", action="store_true", help="whole-process times instead")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(run_row(*arguments.row.split(":"), arguments.planner_limit)))
        return 0
    if arguments.speed:
        sys.path.insert(0, str(HERE))
        from speed import measure_speed

        return measure_speed(arguments.out or HERE / "speed.json", machine())
    rows: list[dict] = []
    out = arguments.out or HERE / "results.json"
    for pair in pairs_of(arguments):
        rows.append(row := run_apart(pair, arguments.planner_limit))
        summary = summary_of(rows)
        document = {"machine": machine(), "summary": summary, "rows": rows}
        out.write_text(json.dumps(document, indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(rows, summary))
        print(told(pair, row), flush=True)
    print(json.dumps(summary_of(rows), indent=1))
    summary = summary_of(rows)
    return 1 if summary["failed"] or summary["search_behind"] else 0


def told(pair: str, row: dict) -> str:
    """A row in a line."""
    if "failed" in row:
        return f"{pair:<24} failed: {row['failed']}"
    found = search_of(row)
    if found.get("iteration_s") is None:
        return f"{pair:<24} no plan: {found.get('reason', '')}"
    behind = "" if row["search_is_best"] else "  BEHIND ANOTHER PLANNER"
    return (
        f"{pair:<24} {1e3 * found['iteration_s']:9.1f} ms  {100 * found['gap']:5.1f} % above  "
        f"search {found['planning_cpu_s']:5.1f} s CPU  row {row['wall_s']:5.1f} s{behind}"
    )


if __name__ == "__main__":
    sys.exit(main())
