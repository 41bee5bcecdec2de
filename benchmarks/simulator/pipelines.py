"""The pipelines that the benchmark plays and scores: equal stages of a chain of layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from time import process_time

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile


@dataclass(frozen=True)
class Case:
    """A pipeline of equal stages; all devices on one host unless ``devices_of_host`` says less.

    Messages over links of infinite rate take no time; others have latencies too.
    ``cores`` is how many devices of a host compute at full speed at once (0: all).
    """

    name: str
    stages: int
    replicas: int
    micro_batches: int
    layers: int
    parameter_bytes: int = 1_000_000
    boundary_bytes: float = 1e6
    link_bytes_per_s: float = inf
    devices_of_host: int = 0
    cores: int = 0
    schedule: str = "1f1b"


@dataclass(frozen=True)
class Pipeline:
    """A case ready to be played."""

    plan: Plan
    problem: PlanningProblem


def pipeline_of(case: Case) -> Pipeline:
    """The plan of a case, and the problem that it answers."""
    devices = case.stages * case.replicas
    each = case.devices_of_host or devices
    is_free = case.link_bytes_per_s == inf
    host = Host(
        "host",
        (Device("device", 1e15),) * each,
        case.link_bytes_per_s,
        port_bytes_per_s=case.link_bytes_per_s / 4,
        link_latency_s=0.0 if is_free else 1e-6,
        port_latency_s=0.0 if is_free else 5e-6,
        full_speed_devices=case.cores,
    )
    cluster = Cluster(
        "cluster", tuple(replace(host, name=f"host{i}") for i in range(-(-devices // each)))
    )
    plan = plan_of(case)
    problem = PlanningProblem(model(case), cluster, plan.global_batch, (plan.micro_batch_size,))
    return Pipeline(plan, problem)


def model(case: Case) -> ModelProfile:
    """A chain of slightly unequal layers, so that no two events coincide for long."""
    layers = tuple(
        LayerCost(
            f"layer{i}",
            Affine(1e-4, 1e-2 + 1e-4 * (i * 7 % 5)),
            Affine(1e-4, 1e-2),
            Affine(1e-4, 1e-2),
            case.parameter_bytes,
            saved_bytes=Affine(0.0, 1e5),
        )
        for i in range(case.layers)
    )
    size = Affine(0.0, case.boundary_bytes)
    edges = tuple(Edge(i, i + 1, f"tensor{i}", size, size) for i in range(case.layers - 1))
    return ModelProfile("chain", layers, edges)


def plan_of(case: Case, moved: int = 0) -> Plan:
    """The plan of a case; its first inner cut is moved by ``moved`` layers."""
    cuts = [round(case.layers * s / case.stages) for s in range(case.stages + 1)]
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
    return Plan(stages, case.micro_batches, case.replicas, case.schedule)


def median_s(works: list[Callable[[], object]]) -> float:
    """Median processor seconds of ``works``, each called once."""
    times: list[float] = []
    for work in works:
        start_s = process_time()
        work()
        times.append(process_time() - start_s)
    return median(times)
