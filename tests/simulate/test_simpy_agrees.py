"""An independent SimPy model of the rules gives the same iteration times."""

from math import isclose
from random import Random

import pytest
from reference.simpy_model import iteration_s

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    SharedParameter,
)
from penstock.simulate import plain
from penstock.simulate.catalogue import workload_of

MEGABYTE = 10**6
INSTANCES = 120


def random_profile(random: Random, layers: int) -> ModelProfile:
    """Unequal layers, skip connections, tensors without rows, a tied parameter."""

    def seconds() -> Affine:
        return Affine(random.uniform(0, 0.5), random.uniform(0.1, 2))

    costs = tuple(
        LayerCost(
            f"layer{i}",
            seconds(),
            seconds(),
            seconds(),
            random.choice([0, 5, 30, 80]) * MEGABYTE,
        )
        for i in range(layers)
    )
    edges: list[Edge] = []
    for i in range(layers - 1):
        rows = Affine(random.uniform(0, 2), random.uniform(1, 9))
        size = random.choice([rows, Affine(random.uniform(1, 9), 0.0)])
        gradient = random.choice([size, Affine()])
        consumers = {i + 1, random.randrange(i + 1, layers)}
        edges += [Edge(i, j, f"tensor{i}", size, gradient) for j in sorted(consumers)]
    ties: tuple[SharedParameter, ...] = ()
    if random.random() < 0.5:
        ties = (SharedParameter("tied", 40 * MEGABYTE, (0, layers - 1)),)
    return ModelProfile("model", costs, tuple(edges), ties, step_s_per_byte=1e-9)


def random_cluster(random: Random) -> Cluster:
    """Unequal devices on up to three hosts with shared ports."""
    hosts = [
        Host(
            f"host{i}",
            tuple(Device("d", 1e12, random.uniform(0.5, 2)) for _ in range(random.randint(1, 4))),
            link_bytes_per_s=random.uniform(2, 40) * random.choice([1, MEGABYTE]),
            port_bytes_per_s=random.uniform(2, 40) * random.choice([1, MEGABYTE]),
            link_latency_s=random.uniform(0, 0.1),
            port_latency_s=random.uniform(0, 0.1),
        )
        for i in range(random.randint(1, 3))
    ]
    return Cluster("cluster", tuple(hosts))


def random_plan(random: Random, layers: int, devices: int) -> Plan:
    """Any cuts, unequal slices, either schedule."""
    stages = random.randint(1, min(layers, devices, 4))
    cuts = [0, *sorted(random.sample(range(1, layers), stages - 1)), layers]
    free = random.sample(range(devices), devices)
    size = random.randint(3, 6)
    made: list[Stage] = []
    for s in range(stages):
        replicas = random.randint(1, min(3, len(free) - (stages - s - 1)))
        ends = [0, *sorted(random.sample(range(1, size), replicas - 1)), size]
        slices = tuple(ends[i + 1] - ends[i] for i in range(replicas))
        mine, free = tuple(free[:replicas]), free[replicas:]
        made.append(Stage(range(cuts[s], cuts[s + 1]), mine, slices, random.random() < 0.5))
    return Plan(tuple(made), random.randint(1, 7), size, random.choice(["1f1b", "gpipe"]))


@pytest.mark.parametrize("seed", range(INSTANCES))
def test_an_independent_model_gives_the_same_iteration_time(seed: int) -> None:
    random = Random(seed)
    profile = random_profile(random, layers=random.randint(2, 7))
    cluster = random_cluster(random)
    plan = random_plan(random, len(profile.layers), len(cluster.devices))
    schedule = order_of(plan)
    simulated_s = plain.play(workload_of(plan, profile, cluster, schedule)).iteration_s
    assert isclose(simulated_s, iteration_s(plan, profile, cluster, schedule), rel_tol=1e-9)
