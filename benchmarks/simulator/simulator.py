"""How many compute actions a second the simulator plays, and how many plans a second it scores.

    python benchmarks/simulator/simulator.py [--out results.json]

Every case is played `REPEATS` times on one core after a first play that compiles or loads the
engine; the median counts. "engine" is the compiled event loop alone, "score" is all that a planner
waits for: memory, durations, messages, arrays, and the event loop.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate import compiled, plain
from penstock.simulate.arrays import Arrays, arrays_of
from penstock.simulate.catalogue import workload_of
from penstock.simulate.event_loop import run
from penstock.simulate.score import make_score

REPEATS = 9
LAYERS = 48


@dataclass(frozen=True)
class Case:
    """A pipeline to play."""

    name: str
    stages: int
    replicas: int
    micro_batches: int
    link_bytes_per_s: float = inf
    hosts: int = 1
    slots: int = 0


CASES = (
    Case("4 stages, 64 micro-batches, free links", 4, 1, 64),
    Case("16 stages, 256 micro-batches, free links", 16, 1, 256),
    Case("16 stages, 256 micro-batches, slow links", 16, 1, 256, 1e3),
    Case("8 stages of 2 replicas, 256 micro-batches, slow links", 8, 2, 256, 1e3),
    Case("the same on 2 hosts with shared ports", 8, 2, 256, 1e3, hosts=2),
    Case("the same on 1 host with 4 cores", 8, 2, 256, 1e3, slots=4),
)


@dataclass(frozen=True)
class Result:
    """What one case measured."""

    name: str
    compute_actions: int
    engine_actions_per_s: float
    plain_actions_per_s: float
    scores_per_s: float


def model() -> ModelProfile:
    """A chain of slightly unequal layers, so that no two events coincide for long."""
    layers = tuple(
        LayerCost(
            f"layer{i}",
            Affine(0.01, 1.0 + 0.01 * (i * 7 % 5)),
            Affine(0.01, 1.0),
            Affine(0.01, 1.0),
            1_000_000,
            saved_bytes=Affine(0.0, 1e3),
        )
        for i in range(LAYERS)
    )
    size = Affine(0.0, 1e3)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(LAYERS - 1))
    return ModelProfile("chain", layers, edges)


def inputs(case: Case) -> tuple[Plan, Cluster]:
    """The plan and the cluster of a case."""
    devices = case.stages * case.replicas
    hosts = tuple(
        Host(
            f"host{i}",
            (Device("device", 1e15),) * (devices // case.hosts),
            case.link_bytes_per_s,
            port_bytes_per_s=case.link_bytes_per_s,
            full_speed_devices=case.slots,
        )
        for i in range(case.hosts)
    )
    width = LAYERS // case.stages
    stages = tuple(
        Stage(
            range(s * width, (s + 1) * width),
            tuple(range(s * case.replicas, (s + 1) * case.replicas)),
            (2,) * case.replicas,
        )
        for s in range(case.stages)
    )
    plan = Plan(stages, case.micro_batches, 2 * case.replicas, "1f1b")
    return plan, Cluster("cluster", hosts)


def median_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of ``work``."""
    times: list[float] = []
    for _ in range(repeats):
        start_s = perf_counter()
        work()
        times.append(perf_counter() - start_s)
    return median(times)


def engine_s(arrays: Arrays) -> float:
    """Seconds of the event loop alone, on fresh copies of the arrays."""
    times: list[float] = []
    for _ in range(REPEATS):
        whole, real = arrays.whole.copy(), arrays.real.copy()
        start_s = perf_counter()
        run(whole, real)
        times.append(perf_counter() - start_s)
    return median(times)


def measure(case: Case) -> Result:
    """Play and score one case."""
    profile = model()
    plan, cluster = inputs(case)
    workload = workload_of(plan, profile, cluster, order_of(plan))
    orders = compiled.orders_of(workload)
    compiled.iteration_s(workload.parts, orders)
    problem = PlanningProblem(profile, cluster, plan.global_batch, (plan.micro_batch_size,))
    score = make_score(problem)
    score(plan)
    return Result(
        case.name,
        workload.actions,
        workload.actions / engine_s(arrays_of(workload.parts, orders)),
        workload.actions / median_s(lambda: plain.play(workload), repeats=3),
        1 / median_s(lambda: score(plan)),
    )


def main() -> None:
    """Measure all cases, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    out = parser.parse_args().out
    results = [measure(case) for case in CASES]
    print(f"{'case':<56}{'actions':>9}{'engine M/s':>12}{'plain M/s':>11}{'scores/s':>10}")
    for result in results:
        print(
            f"{result.name:<56}{result.compute_actions:>9}"
            f"{result.engine_actions_per_s / 1e6:>12.2f}{result.plain_actions_per_s / 1e6:>11.3f}"
            f"{result.scores_per_s:>10.0f}"
        )
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    document = {"machine": machine, "python": platform.python_version()}
    document["results"] = [asdict(result) for result in results]
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
