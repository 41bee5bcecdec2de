"""Planners on the published questions: CPU seconds, and the simulated time of their plans."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

from published_runs import OPTIMIZER_BYTES, PublishedRun, plan_of, problem_of, published_runs

from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import micro_batch_sizes_of
from penstock.planning.answers import TimeLimit, find_plan
from penstock.planning.planning_problem import schedules_named
from penstock.planning.tensor_groups import on_groups, without_groups
from penstock.simulate.score import make_score

QUESTIONS = (("sc21", 1920, 30.0), ("sc21", 3072, 120.0), ("llama3", 8192, 120.0))
"""Source, GPUs, and the CPU seconds that planning may take."""

PLANNERS = ("dapple", "pipedream", "search")
GIVE_UP = 3
"""A process is ended after so many times its limit, in wall seconds."""


def planning_rows() -> list[dict[str, Any]]:
    """Every planner on every question, each in a process of its own."""
    return [asked_apart(*question, planner) for question in QUESTIONS for planner in PLANNERS]


def asked_apart(source: str, gpus: int, limit_s: float, planner: str) -> dict[str, Any]:
    """One planner on one question."""
    command = [sys.executable, __file__, source, str(gpus), str(limit_s), planner]
    try:
        timeout_s = GIVE_UP * limit_s
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except subprocess.TimeoutExpired:
        return {"source": source, "gpus": gpus, "planner": planner, "cpu_s": GIVE_UP * limit_s}
    return json.loads(done.stdout)


def answer(run: PublishedRun, limit_s: float, planner: str) -> dict[str, Any]:
    """A planner's answer to the question that the published plan answers, on the same groups."""
    start_s = process_time()
    published, problem = on_groups(plan_of(run), problem_of(run))
    state = OPTIMIZER_BYTES / (run.replicas if run.overlaps else 1)
    problem = replace(
        problem,
        schedules=schedules_named("auto", planner),
        micro_batch_sizes=micro_batch_sizes_of(run.batch),
        optimizer_bytes_per_parameter_byte=state,
    )
    score = make_score(problem)
    row: dict[str, Any] = {
        "run": f"{run.name}, {run.gpus:,} GPUs",
        "devices": len(problem.cluster.devices),
        "planner": planner,
        "limit_s": limit_s,
    }
    try:
        limit = TimeLimit(limit_s, process_time)
        found = find_plan(problem, planner, score, limit=limit)
    except Infeasible:
        row["failed"] = "nothing fits"
    else:
        row["plan"] = in_words(found)
        row["planned_s"] = score(found)
    row["cpu_s"] = process_time() - start_s
    row["published_plan_s"] = make_score(problem)(without_groups(published))
    return row


def in_words(plan: Plan) -> str:
    """Schedule, stages and replicas of a plan."""
    replicas = sorted({stage.replicas for stage in plan.stages})
    spread = f"{replicas[0]}" if len(replicas) == 1 else f"{replicas[0]} to {replicas[-1]}"
    return (
        f"{plan.schedule}, {len(plan.stages)} stages, {spread} replicas, "
        f"{plan.micro_batches} x {plan.micro_batch_size}"
    )


def main() -> None:
    """One question, answered as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("gpus", type=int)
    parser.add_argument("limit", type=float)
    parser.add_argument("planner")
    asked = parser.parse_args()
    run = next(r for r in published_runs() if (r.source, r.gpus) == (asked.source, asked.gpus))
    row = answer(run, asked.limit, asked.planner)
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    print(json.dumps(row | {"peak_bytes": 1024 * int(peak), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
