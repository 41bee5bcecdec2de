"""A job that is measured, predicted and trained with real workers."""

import tempfile
from dataclasses import replace
from pathlib import Path

from other_load import other_load

from penstock.cluster.toml_file import write_cluster
from penstock.plan.json_file import read_plan, write_plan
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.row_split import split_rows
from penstock.profile.json_file import write_profile
from penstock.runtime.processes.heartbeat import LIMIT_S
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.processes.world import join_world
from penstock.train.job import Job
from penstock.train.profile_job import cost_job
from penstock.train.train import TrainRequest, train_job


def balanced(job: Job, costs: PlanningProblem, replicas: tuple[int, ...], schedule: str) -> Plan:
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


def run(
    job: Job, costs: PlanningProblem, plan: Plan | None, steps: int, workers: int
) -> tuple[Plan, dict[str, float]]:
    """Predict and train by the plan, or by that which `penstock train` finds for these costs.

    Returns it, both iteration times, the error, and how much others disturbed.
    """
    with tempfile.TemporaryDirectory() as folder, other_load() as load:
        out, given = Path(folder) / "run", Path(folder) / "plan.json"
        out.mkdir()
        write_profile(costs.profile, out / "profile.json")
        write_cluster(costs.cluster, out / "cluster.toml")
        if plan:
            write_plan(plan, given)
        request = TrainRequest(workers=workers, plan=given if plan else None, out=out, shown=False)
        result = train_job(replace(job, steps=steps, evaluate_every=0, checkpoint_every=0), request)
        plan = read_plan(out / "plan.json")
    return plan, {
        "predicted_s": result.predicted_s,
        "measured_s": result.measured_s,
        "error": result.predicted_s / result.measured_s - 1,
        "others_cores": round(load.cores, 2),
    }


def cost_worker(job: Job) -> PlanningProblem | None:
    """Run by each worker: measure while all others do."""
    return cost_job(join_world("cpu", LIMIT_S), job, "cpu")


def measured_costs(job: Job, workers: int) -> PlanningProblem:
    """Profile and cluster, measured by this number of workers at the same time."""
    costs, *_ = launch_workers(cost_worker, (job,), workers=workers)
    return costs


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
