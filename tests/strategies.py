"""Hypothesis strategies: profiles, clusters and plans that belong together."""

from dataclasses import dataclass

from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    SharedParameter,
)

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Case:
    """A plan with the profile and the cluster it is for."""

    profile: ModelProfile
    cluster: Cluster
    plan: Plan


def seconds(most: float = 2.0) -> st.SearchStrategy[float]:
    """Times, zero and equal ones among them."""
    return st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.01, most))


def affine(values: st.SearchStrategy[float]) -> st.SearchStrategy[Affine]:
    """Costs with and without a fixed part."""
    return st.builds(Affine, st.one_of(st.just(0.0), values), values)


def layer_costs() -> st.SearchStrategy[LayerCost]:
    """One layer; half of them without parameters, some larger than a gradient bucket."""
    sizes = affine(st.floats(0, 1e3))
    return st.builds(
        LayerCost,
        st.just("layer"),
        affine(seconds()),
        affine(seconds()),
        affine(seconds()),
        st.sampled_from([0, 0, 3 * MEGABYTE, 20 * MEGABYTE, 70 * MEGABYTE]),
        st.integers(0, 1000),
        sizes,
        sizes,
    )


@st.composite
def profiles(draw: st.DrawFn, most_layers: int = 7) -> ModelProfile:
    """A chain with skip connections, tensors without rows or gradients, and tied parameters."""
    layers = draw(st.lists(layer_costs(), min_size=1, max_size=most_layers))
    count = len(layers)
    edges: list[Edge] = []
    for producer in range(count - 1):
        consumers = {producer + 1}
        if draw(st.booleans()):
            consumers.add(draw(st.integers(producer + 1, count - 1)))
        size = draw(
            st.builds(Affine, st.sampled_from([0.0, 3.0]), st.sampled_from([0.0, 1.0, 7.5]))
        )
        gradient = size if draw(st.booleans()) else Affine()
        edges += [Edge(producer, c, f"t{producer}", size, gradient) for c in sorted(consumers)]
    shared: list[SharedParameter] = []
    if count > 1 and draw(st.booleans()):
        users = tuple(sorted({draw(st.integers(0, count - 1)), count - 1}))
        shared.append(SharedParameter("tied", draw(st.integers(1, 40)) * MEGABYTE, users))
    return ModelProfile(
        "model",
        tuple(layers),
        tuple(edges),
        tuple(shared),
        step_s_per_byte=draw(st.sampled_from([0.0, 1e-8])),
        stage_forward_s=draw(st.sampled_from([0.0, 0.05])),
        stage_backward_s=draw(st.sampled_from([0.0, 0.07])),
    )


@st.composite
def clusters(draw: st.DrawFn, most_hosts: int = 3, most_devices: int = 4) -> Cluster:
    """Hosts with unequal devices, ports, latencies, too few cores; sometimes an explicit link."""
    rates = st.sampled_from([float("inf"), 20.0, 3.0])
    latencies, streams = st.sampled_from([0.0, 0.1]), st.sampled_from([False, False, True])
    hosts: list[Host] = []
    for index in range(draw(st.integers(1, most_hosts))):
        speeds = draw(
            st.lists(st.sampled_from([1.0, 1.0, 2.0, 0.7]), min_size=1, max_size=most_devices)
        )
        hosts.append(
            Host(
                f"host{index}",
                tuple(
                    Device("device", 1e12, speed, concurrent_passes=draw(streams))
                    for speed in speeds
                ),
                link_bytes_per_s=draw(rates),
                port_bytes_per_s=draw(rates),
                link_latency_s=draw(latencies),
                port_latency_s=draw(latencies),
                full_speed_devices=draw(st.sampled_from([0, 0, 1, 2])),
                separate_links=draw(st.sampled_from([False, False, True])),
            )
        )
    total = sum(len(host.devices) for host in hosts)
    links: tuple[Link, ...] = ()
    if total > 1 and draw(st.booleans()):
        links = (Link(0, total - 1, 50.0, 0.01),)
    stream = any(device.concurrent_passes for host in hosts for device in host.devices)
    in_order, step_s = not stream and draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, 0.2]))
    return Cluster("cluster", tuple(hosts), links, in_order, step_s)


@st.composite
def plans(draw: st.DrawFn, layers: int, devices: int, most_micro_batches: int = 6) -> Plan:
    """Cuts, replication with unequal slices, shuffled devices, both schedules, recompute."""
    stages = draw(st.integers(1, min(layers, devices, 4)))
    cuts = sorted(draw(st.permutations(range(1, layers)))[: stages - 1])
    bounds = [0, *cuts, layers]
    order = draw(st.permutations(range(devices)))
    micro_batch_size = draw(st.integers(1, 5))
    made: list[Stage] = []
    free = list(order)
    for index in range(stages):
        still_needed = stages - index - 1
        most = min(len(free) - still_needed, micro_batch_size, 3)
        replicas = draw(st.integers(1, most))
        mine, free = free[:replicas], free[replicas:]
        ends = sorted(draw(st.permutations(range(1, micro_batch_size)))[: replicas - 1])
        row_bounds = [0, *ends, micro_batch_size]
        slices = tuple(row_bounds[i + 1] - row_bounds[i] for i in range(replicas))
        layers_of_stage = range(bounds[index], bounds[index + 1])
        made.append(Stage(layers_of_stage, tuple(mine), slices, draw(st.booleans())))
    micro_batches = draw(st.integers(1, most_micro_batches))
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    return Plan(tuple(made), micro_batches, micro_batch_size, schedule)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A profile, a cluster, and a plan of the one for the other."""
    profile = draw(profiles())
    cluster = draw(clusters())
    return Case(profile, cluster, draw(plans(len(profile.layers), len(cluster.devices))))
