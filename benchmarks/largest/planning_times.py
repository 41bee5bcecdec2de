"""Planners on the published questions: CPU seconds, and the simulated time of their plans."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from resource import RLIMIT_CPU, RUSAGE_SELF, getrusage, setrlimit
from time import process_time
from typing import Any

from published_runs import (
    OPTIMIZER_BYTES,
    PublishedRun,
    plan_of,
    predicted,
    problem_of,
    published_runs,
)

from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import micro_batch_sizes_of
from penstock.planners.find_plan import TimeLimit, find_plan
from penstock.planners.problem import schedules_named
from penstock.planners.tensor_groups import on_groups
from penstock.simulate.score import make_score

QUESTIONS = (
    ("sc21", 1920, 25.0),
    ("sc21", 3072, 120.0),
    ("llama3", 8192, 120.0),
    ("llama3", 16384, 120.0),
)
"""Source, GPUs, and the limit of a planner in CPU seconds."""

PLANNERS = ("dapple", "pipedream", "search")

GIVE_UP = 1.5
"""The multiple of its limit, in CPU seconds, after which a process is ended."""


def planning_rows() -> list[dict[str, Any]]:
    """Every planner on every question, each in a process of its own."""
    return [asked_apart(*question, planner) for question in QUESTIONS for planner in PLANNERS]


def asked_apart(source: str, gpus: int, limit_s: float, planner: str) -> dict[str, Any]:
    """One planner on one question."""
    command = [sys.executable, __file__, source, str(gpus), str(limit_s), planner]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout)
    run = run_at(source, gpus)
    return described(run, planner) | {"failed": f"none in {GIVE_UP * limit_s:g} s"}


def run_at(source: str, gpus: int) -> PublishedRun:
    """The published run of a source on this number of GPUs."""
    return next(run for run in published_runs() if (run.source, run.gpus) == (source, gpus))


def described(run: PublishedRun, planner: str) -> dict[str, Any]:
    """The problem, and its planner."""
    devices = run.gpus // run.tensor
    return {"run": f"{run.name}, {run.gpus:,} GPUs", "devices": devices, "planner": planner}


def answer(run: PublishedRun, limit_s: float, planner: str) -> dict[str, Any]:
    """A planner's answer to the question that the published plan answers, on the same groups."""
    start_s = process_time()
    _, problem = on_groups(plan_of(run), problem_of(run))
    problem = replace(
        problem,
        schedules=schedules_named("auto", planner),
        micro_batch_sizes=micro_batch_sizes_of(run.batch),
        optimizer_bytes_per_parameter_byte=OPTIMIZER_BYTES / (run.replicas if run.sharded else 1),
    )
    score = make_score(problem)
    try:
        found = find_plan(problem, planner, score, limit=TimeLimit(limit_s, process_time))
    except Infeasible:
        return {"failed": "nothing fits", "cpu_s": process_time() - start_s}
    return {
        "cpu_s": process_time() - start_s,
        "plan": in_words(found),
        "planned_s": score(found),
        "published_plan_s": predicted(run).iteration_s,
    }


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
    most_s = round(GIVE_UP * asked.limit)
    setrlimit(RLIMIT_CPU, (most_s, most_s))
    run = run_at(asked.source, asked.gpus)
    row = described(run, asked.planner) | answer(run, asked.limit, asked.planner)
    row["peak_bytes"] = 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    print(json.dumps(row))


if __name__ == "__main__":
    main()
