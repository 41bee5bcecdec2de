"""How long a planner waits for the score of a plan, by what of it was scored before.

    python benchmarks/simulator/scoring.py [--out scoring.json]

Milliseconds of processor time on one core, median of `REPEATS` calls. "again" scores one plan over
and over; "moved" moves the first cut before every call, so that two stages and their boundaries are
mostly new (where there is one stage, that is the same as "again");
"fresh" makes a new score for every call, so that everything is new; "engine" is the event loop
alone. Compiled code is loaded before.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from time import process_time

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.arrays import arrays_of
from penstock.simulate.catalogue import Catalogue
from penstock.simulate.event_loop import run
from penstock.simulate.orders import orders_of_plan
from penstock.simulate.score import make_score

REPEATS = 15
LAYERS = 96


@dataclass(frozen=True)
class Case:
    """A plan of equal stages on hosts of eight devices."""

    name: str
    stages: int
    replicas: int
    micro_batches: int


CASES = (
    Case("16 stages, 64 micro-batches", 16, 1, 64),
    Case("2 stages of 8 replicas, 8 micro-batches", 2, 8, 8),
    Case("8 stages of 2 replicas, 256 micro-batches", 8, 2, 256),
    Case("64 stages, 4,096 micro-batches", 64, 1, 4096),
    Case("64 stages of 16 replicas, 256 micro-batches", 64, 16, 256),
    Case("32 stages of 32 replicas, 256 micro-batches", 32, 32, 256),
    Case("1 stage of 1,024 replicas, 1 micro-batch", 1, 1024, 1),
)


@dataclass(frozen=True)
class Result:
    """Milliseconds of one case, and the most memory the process had used by then."""

    name: str
    engine_ms: float
    again_ms: float
    moved_ms: float
    fresh_ms: float
    peak_mebibytes: int


def model() -> ModelProfile:
    """A chain of slightly unequal layers of 40 MB, so that gradients go in many buckets."""
    layers = tuple(
        LayerCost(
            f"layer{i}",
            Affine(0.001, 0.01 + 0.0001 * (i * 7 % 5)),
            Affine(0.001, 0.01),
            Affine(0.0, 0.01),
            40_000_000,
            saved_bytes=Affine(0.0, 1e5),
        )
        for i in range(LAYERS)
    )
    size = Affine(0.0, 4e6)
    edges = tuple(Edge(i, i + 1, f"t{i}", size, size) for i in range(LAYERS - 1))
    return ModelProfile("chain", layers, edges)


def plan_of(case: Case, moved: int = 0) -> Plan:
    """The plan of a case; its first inner cut is moved by ``moved`` layers."""
    cuts = [round(LAYERS * s / case.stages) for s in range(case.stages + 1)]
    if case.stages > 1 and moved:
        cuts[1] = 1 + (cuts[1] - 1 + moved) % (cuts[2] - 1)
    stages = tuple(
        Stage(
            range(cuts[s], cuts[s + 1]),
            tuple(range(s * case.replicas, (s + 1) * case.replicas)),
            (1,) * case.replicas,
        )
        for s in range(case.stages)
    )
    return Plan(stages, case.micro_batches, case.replicas, "1f1b")


def problem_of(case: Case) -> PlanningProblem:
    """The problem that the case's plan answers."""
    hosts = -(-case.stages * case.replicas // 8)
    host = Host("host", (Device("device", 1e15),) * 8, 2e11, 5e10, 1e-6, 5e-6)
    cluster = Cluster("cluster", tuple(replace(host, name=f"host{i}") for i in range(hosts)))
    batch = case.micro_batches * case.replicas
    return PlanningProblem(model(), cluster, batch, (case.replicas,))


def milliseconds(works: list[Callable[[], object]]) -> float:
    """Median processor time of ``works``, each called once."""
    times: list[float] = []
    for work in works:
        start_s = process_time()
        work()
        times.append(process_time() - start_s)
    return 1e3 * median(times)


def measure(case: Case) -> Result:
    """All four ways to score one case."""
    problem, plan = problem_of(case), plan_of(case)
    orders = orders_of_plan(plan)
    parts = Catalogue(problem.profile, problem.cluster).parts_of(plan, orders.instances)
    made = [arrays_of(parts, orders) for _ in range(REPEATS)]
    engine_ms = milliseconds([lambda a=a: run(a.whole, a.real) for a in made])
    del made
    score = make_score(problem)
    score(plan)
    plans = [plan_of(case, moved) for moved in range(1, REPEATS + 1)]
    return Result(
        case.name,
        engine_ms,
        milliseconds([lambda: score(plan)] * REPEATS),
        milliseconds([lambda p=p: score(p) for p in plans]),
        milliseconds([lambda: make_score(problem)(plan)] * 3),
        getrusage(RUSAGE_SELF).ru_maxrss // 1024,
    )


def main() -> None:
    """Measure all cases, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("scoring.json"))
    out = parser.parse_args().out
    measure(CASES[0])
    results = [measure(case) for case in CASES]
    print(f"{'milliseconds':<46}{'engine':>9}{'again':>9}{'moved':>9}{'fresh':>9}{'MiB':>7}")
    for r in results:
        times = (r.engine_ms, r.again_ms, r.moved_ms, r.fresh_ms)
        print(f"{r.name:<46}" + "".join(f"{t:>9.2f}" for t in times) + f"{r.peak_mebibytes:>7}")
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    document = {"machine": machine, "python": platform.python_version()}
    document["results"] = [asdict(result) for result in results]
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
