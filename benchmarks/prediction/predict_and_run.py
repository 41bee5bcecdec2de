"""Predicted against measured iteration time of the built-in jobs under several plans.

Each job is measured once (layers, links), each plan is simulated from that, then trained for some
steps with real workers. Run it from the repository:

    python benchmarks/prediction/predict_and_run.py
    python benchmarks/prediction/predict_and_run.py --workers 2 --jobs gpt-text --schedules
"""

import json
import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from other_load import QUIET_CORES, other_load, wait_until_quiet

from penstock.cluster.toml_file import write_cluster
from penstock.jobs.job import Job
from penstock.jobs.job_file import find_job
from penstock.jobs.plan_job import problem_of
from penstock.jobs.profile_job import CostedJob, cost_job
from penstock.jobs.train import TrainRequest, train_job
from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan, Stage
from penstock.plan.row_split import split_rows
from penstock.profile.json_file import write_profile
from penstock.runtime.processes.heartbeat import LIMIT_S
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.processes.world import join_world
from penstock.search.families import rescheduled
from penstock.search.search import PLANNERS
from penstock.simulate.score import make_score

HERE = Path(__file__).parent
ATTEMPTS = 3
SCHEDULES = (
    "early-backward",
    "zb-h1",
    "zb-h2",
    "interleaved",
    "hanayo",
    "zb-v",
    "v-min",
    "zero-bubble",
    "chimera",
    "dualpipe",
)
"""Kinds of schedules: split backwards, several stages a worker, stages held twice."""

Row: TypeAlias = dict[str, object]
Result = TypeVar("Result")


def balanced(job: Job, costs: CostedJob, replicas: tuple[int, ...], schedule: str) -> Plan:
    """Stages with the given replicas, cut so that work per replica is as even as possible."""
    profile = costs.profile
    rows = max(job.micro_batch_choices())
    forward, backward = profile.prefix_sums(rows)
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    cuts = [0]
    for done in range(1, len(replicas)):
        target = work[-1] * sum(replicas[:done]) / sum(replicas)
        left = range(cuts[-1] + 1, len(profile.layers) - (len(replicas) - done) + 1)
        cuts.append(min(left, key=lambda cut: abs(work[cut] - target)))
    cuts.append(len(profile.layers))
    stages, device = [], 0
    for index, count in enumerate(replicas):
        devices = tuple(range(device, device + count))
        stages.append(
            Stage(range(cuts[index], cuts[index + 1]), devices, split_rows(rows, (1,) * count))
        )
        device += count
    return Plan(tuple(stages), job.batch_size // rows, rows, schedule)


def plans_of(job: Job, costs: CostedJob) -> dict[str, Plan]:
    """The planner's choice, and plans by hand that differ from it as much as they can."""
    problem = problem_of(job, costs.profile, costs.cluster)
    plans = {"search": PLANNERS["search"](problem, make_score(problem))}
    for replicas in ((1, 1), (1, 1, 1, 1), (2, 2), (3, 1), (2, 1, 1), (4,)):
        plans["+".join(map(str, replicas)) + " 1f1b"] = balanced(job, costs, replicas, "1f1b")
    plans["1+1+1+1 gpipe"] = balanced(job, costs, (1, 1, 1, 1), "gpipe")
    return plans


def plans_by_schedule(job: Job, costs: CostedJob, workers: int) -> dict[str, Plan]:
    """One plan for each kind of schedule, on the same workers."""
    problem = problem_of(job, costs.profile, costs.cluster)
    score = make_score(problem)
    base = balanced(job, costs, (1,) * workers, "1f1b")
    plans = {"1f1b": base}
    for name in SCHEDULES:
        plan = rescheduled(problem, base, name, score)
        if plan is not None:
            plans[name] = plan
    return plans


def run(job: Job, costs: CostedJob, plan: Plan, steps: int, workers: int) -> dict[str, float]:
    """Predict and train; the two iteration times, the error, and how much others disturbed."""
    with tempfile.TemporaryDirectory() as folder, other_load() as load:
        out = Path(folder) / "run"
        out.mkdir()
        write_profile(costs.profile, out / "profile.json")
        write_cluster(costs.cluster, out / "cluster.toml")
        write_plan(plan, Path(folder) / "plan.json")
        request = TrainRequest(
            workers=workers, plan=Path(folder) / "plan.json", out=out, shown=False
        )
        result = train_job(replace(job, steps=steps, evaluate_every=0, checkpoint_every=0), request)
    return {
        "predicted_s": result.predicted_s,
        "measured_s": result.measured_s,
        "error": result.predicted_s / result.measured_s - 1,
        "others_cores": round(load.cores, 2),
    }


def least_disturbed(attempt: Callable[[], tuple[Result, float]], wait_s: float) -> Result:
    """The result of the attempt that others disturbed least; the first undisturbed one ends it."""
    best: tuple[Result, float] | None = None
    for _ in range(ATTEMPTS):
        wait_until_quiet(wait_s)
        result, cores = attempt()
        if best is None or cores < best[1]:
            best = (result, cores)
        if cores < QUIET_CORES:
            break
    assert best is not None
    return best[0]


def cost_worker(job: Job) -> CostedJob | None:
    """Run by each worker: measure while all others do."""
    return cost_job(join_world("cpu", LIMIT_S), job, "cpu")


def measured_costs(job: Job, workers: int) -> CostedJob:
    """Profile and cluster, measured by so many workers at the same time."""
    costs, *_ = launch_workers(cost_worker, (job,), workers=workers)
    return costs


def costs_of(job: Job, wait_s: float, workers: int) -> CostedJob:
    """Profile and cluster, measured undisturbed where possible."""

    def attempt() -> tuple[CostedJob, float]:
        with other_load() as load:
            costs = measured_costs(job, workers)
        return costs, load.cores

    return least_disturbed(attempt, wait_s)


def row_of(job: Job, costs: CostedJob, label: str, plan: Plan, arguments: Namespace) -> Row:
    """One line of the results."""

    def attempt() -> tuple[dict[str, float], float]:
        figures = run(job, costs, plan, arguments.steps, arguments.workers)
        return figures, figures["others_cores"]

    figures = least_disturbed(attempt, arguments.wait)
    stages = [[stage.layers.start, stage.layers.stop, stage.replicas] for stage in plan.stages]
    print(
        f"{job.name:9} {label:14} predicted {figures['predicted_s'] * 1e3:7.1f} ms  measured "
        f"{figures['measured_s'] * 1e3:7.1f} ms  error {figures['error']:+.1%}  others used "
        f"{figures['others_cores']} cores",
        flush=True,
    )
    return {"job": job.name, "plan": label, "stages": stages, **figures}


def main() -> None:
    """Run every job under every plan and write the results beside this file."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jobs", nargs="+", default=["gpt-text", "digits"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--schedules", action="store_true", help="one plan for each schedule")
    parser.add_argument("--wait", type=float, default=120.0, help="seconds to wait for quiet")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for job in map(find_job, arguments.jobs):
        costs = costs_of(job, arguments.wait, arguments.workers)
        if arguments.schedules:
            plans = plans_by_schedule(job, costs, arguments.workers)
        else:
            plans = plans_of(job, costs)
        for label, plan in plans.items():
            rows.append(row_of(job, costs, label, plan, arguments))
    machine = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "workers": arguments.workers,
        "steps": arguments.steps,
    }
    arguments.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    main()
