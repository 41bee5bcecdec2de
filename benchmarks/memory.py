"""Peak memory of each rank: predicted by the simulator, measured by torch's allocators.

`python benchmarks/memory.py [JOB ...]` cuts the model of each job into two stages of about equally
many layers, on two workers, and prints the peaks; with `--json` for a program. Bytes are counted,
so other work on the machine changes nothing.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import torch.distributed as dist

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.measure.layer_times import measure_profile
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.simulate.simulation import simulate_plan
from penstock.train.job_file import find_job
from penstock.train.optimizers import optimizer_factory, state_bytes_per_parameter_byte
from penstock.train.profile_job import build_and_capture

CASES = (
    ("gpipe", "none"),
    ("gpipe", "all"),
    ("1f1b", "none"),
    ("zb-h1", "none"),
)


@dataclass(frozen=True)
class Row:
    """One rank of one case."""

    job: str
    schedule: str
    recompute: str
    rank: int
    predicted_bytes: float
    measured_bytes: float
    lasting_bytes: float


def plan_for(layers: int, rows: int, micro_batches: int, schedule: str, recompute: str) -> Plan:
    """Two stages; ``some`` recomputes the first half of each stage's layers."""
    middle = (layers + 1) // 2
    stages: list[Stage] = []
    for device, own in enumerate((range(middle), range(middle, layers))):
        stages.append(Stage(own, (device,), (rows,), recompute == "all"))
    return Plan(tuple(stages), micro_batches, rows, schedule)


def rows_of_job(name: str, cases: list[tuple[str, str]]) -> list[Row]:
    """The figures of a rank; every rank runs this."""
    dist.init_process_group("gloo")
    job = find_job(name)
    graph, batch = build_and_capture(job), job.example_batch()
    rows = min(job.micro_batch_choices())
    profile = measure_profile(graph, batch, batch_sizes=(1, rows), repeats=1)
    pair = Cluster("pair", (Host("here", (Device("cpu", 1e12),) * 2, inf),))
    state = state_bytes_per_parameter_byte(job.optimizer)
    found: list[Row] = []
    for schedule, recompute in cases:
        layers, micro_batches = len(graph.layer_names), job.batch_size // rows
        plan = plan_for(layers, rows, micro_batches, schedule, recompute)
        prediction = simulate_plan(plan, profile, pair, optimizer_bytes_per_parameter_byte=state)
        optimizer = optimizer_factory(job.optimizer)
        with Pipeline(graph, batch, plan=plan, optimizer=optimizer, verify="off") as pipe:
            pipe.step(batch)
            with pipe.measuring_memory() as memory:
                pipe.step(batch)
            predicted = prediction.peak_memory_bytes[pipe.rank]
            case = (name, schedule, recompute, pipe.rank)
            found.append(Row(*case, predicted, memory.peak_bytes, memory.held_bytes))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", default=["digits", "gpt-text"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="a schedule; all of them where left out")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in ("", case[0])]
    rows: list[dict[str, Any]] = []
    for job in arguments.jobs:
        by_rank = launch_workers(rows_of_job, (job, cases), workers=2, threads=1)
        rows += [asdict(row) for case in zip(*by_rank, strict=True) for row in case]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("job        schedule  recompute  rank  predicted  measured   ratio  lasting  (MiB)")
    for row in rows:
        sizes = [row[f"{what}_bytes"] / 2**20 for what in ("predicted", "measured", "lasting")]
        print(
            f"{row['job']:10} {row['schedule']:9} {row['recompute']:9} {row['rank']:5}"
            f" {sizes[0]:10.2f} {sizes[1]:9.2f} {sizes[1] / sizes[0]:7.3f} {sizes[2]:8.2f}"
        )


if __name__ == "__main__":
    main()
