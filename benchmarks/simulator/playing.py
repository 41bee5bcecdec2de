"""Actions a second that one core plays, and the time of a plan's score."""

import sys
from dataclasses import dataclass
from pathlib import Path

from pipelines import Case, median_s, pipeline_of, plan_of

from penstock.plan.ordering import order_of
from penstock.simulate.catalogue import Catalogue, workload_of
from penstock.simulate.compiled import played_s
from penstock.simulate.orders import orders_of_plan
from penstock.simulate.score import make_score

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from reference.plain_simulator import play

REPEATS = 9
SLOW_REPEATS = 3

SLOW = 4e8
PLAYED = (
    Case("4 stages, 64 micro-batches, free links", 4, 1, 64, 48),
    Case("16 stages, 256 micro-batches, free links", 16, 1, 256, 48),
    Case("16 stages, 256 micro-batches, slow links", 16, 1, 256, 48, link_bytes_per_s=SLOW),
    Case("8 stages of 2 replicas, slow links", 8, 2, 256, 48, link_bytes_per_s=SLOW),
    Case(
        "the same on 2 hosts with shared ports",
        8,
        2,
        256,
        48,
        link_bytes_per_s=SLOW,
        devices_of_host=8,
    ),
    Case("the same on 1 host with 4 cores", 8, 2, 256, 48, link_bytes_per_s=SLOW, cores=4),
)


def on_hosts_of_eight(name: str, stages: int, replicas: int, micro_batches: int) -> Case:
    """A case of a planner's size: 96 layers of 40 MB, whose gradients go in many buckets."""
    return Case(
        name,
        stages,
        replicas,
        micro_batches,
        96,
        parameter_bytes=40_000_000,
        boundary_bytes=4e6,
        link_bytes_per_s=2e11,
        devices_of_host=8,
    )


SCORED = (
    on_hosts_of_eight("16 stages, 64 micro-batches", 16, 1, 64),
    on_hosts_of_eight("2 stages of 8 replicas, 8 micro-batches", 2, 8, 8),
    on_hosts_of_eight("8 stages of 2 replicas, 256 micro-batches", 8, 2, 256),
    on_hosts_of_eight("64 stages, 4,096 micro-batches", 64, 1, 4096),
    on_hosts_of_eight("64 stages of 16 replicas, 256 micro-batches", 64, 16, 256),
    on_hosts_of_eight("32 stages of 32 replicas, 256 micro-batches", 32, 32, 256),
    on_hosts_of_eight("1 stage of 1,024 replicas, 1 micro-batch", 1, 1024, 1),
)


@dataclass(frozen=True)
class Played:
    """Compute actions of a pipeline, and how many a second each engine plays."""

    name: str
    compute_actions: int
    engine_actions_per_s: float
    plain_actions_per_s: float


@dataclass(frozen=True)
class Scored:
    """Milliseconds of a score: the engine alone, and all of it by what was scored before."""

    name: str
    engine_ms: float
    again_ms: float
    moved_ms: float
    fresh_ms: float


def engine_s(case: Case, repeats: int) -> float:
    """Seconds of the engine alone, on parts made before."""
    pipeline = pipeline_of(case)
    orders = orders_of_plan(pipeline.plan)
    catalogue = Catalogue(pipeline.problem.profile, pipeline.problem.cluster)
    parts = catalogue.parts_of(pipeline.plan, orders.instances)
    played_s(parts, orders)
    return median_s([lambda: played_s(parts, orders)] * repeats)


def play_case(case: Case) -> Played:
    """Both engines on one pipeline, after a first play that converts the parts."""
    pipeline = pipeline_of(case)
    problem = pipeline.problem
    workload = workload_of(pipeline.plan, problem.profile, problem.cluster, order_of(pipeline.plan))
    plain_s = median_s([lambda: play(workload)] * SLOW_REPEATS)
    return Played(
        case.name,
        workload.actions,
        workload.actions / engine_s(case, REPEATS),
        workload.actions / plain_s,
    )


def score_case(case: Case) -> Scored:
    """All four ways to score one plan."""
    pipeline = pipeline_of(case)
    score = make_score(pipeline.problem)
    score(pipeline.plan)
    plans = [plan_of(case, moved) for moved in range(1, REPEATS + 1)]
    return Scored(
        case.name,
        1e3 * engine_s(case, REPEATS),
        1e3 * median_s([lambda: score(pipeline.plan)] * REPEATS),
        1e3 * median_s([lambda p=p: score(p) for p in plans]),
        1e3 * median_s([lambda: make_score(pipeline.problem)(pipeline.plan)] * SLOW_REPEATS),
    )
