"""Plans and models of rehearsals, and what their processes run with a mistake on purpose."""

from dataclasses import replace
from typing import Any

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile, SharedParameter
from penstock.rehearse.emulation import Emulation
from penstock.rehearse.rehearsing_rank import RankRecord, rehearse_rank
from penstock.runtime import program as programs

MIB = 1 << 20


def layered(layers: int, *, tied: bool = False, skip: bool = False) -> ModelProfile:
    """Layers of unequal times and sizes; perhaps the first and last tied, or edges that skip."""
    costs = tuple(
        LayerCost(
            f"layer {i}",
            Affine(0.001, 0.002 + 0.0005 * (i % 3)),
            Affine(0.001, 0.002),
            Affine(0.001, 0.001 + 0.0005 * (i % 2)),
            (3 + 7 * (i % 4)) * MIB,
            saved_bytes=Affine(0, 100_000),
        )
        for i in range(layers)
    )
    edges = [
        Edge(i, i + 1, "x", Affine(0, 400_000 + 10_000 * i), Affine(0, 400_000 + 10_000 * i))
        for i in range(layers - 1)
    ]
    if skip:
        edges.append(Edge(0, layers - 1, "skip", Affine(0, 90_000), Affine(0, 90_000)))
        edges.append(Edge(0, layers - 2, "mask", Affine(5_000, 0), Affine()))
        edges += [Edge(1, k, "far", Affine(0, 30_000), Affine(0, 30_000)) for k in (3, layers - 1)]
    shared = (SharedParameter("embedding", 40 * MIB, (0, layers - 1)),) if tied else ()
    return ModelProfile("layered", costs, tuple(edges), shared, batch_size=2, step_s_per_byte=1e-10)


def two_hosts(devices: int = 4) -> Cluster:
    """Two hosts with a slow link between them; the second has slower devices."""
    half = devices // 2
    fast, slow = Device("gpu", 16e9), Device("old gpu", 16e9, speed=0.8)
    rates = {"link_bytes_per_s": 1e9, "port_bytes_per_s": 4e8, "port_latency_s": 2e-4}
    hosts = Host("a", (fast,) * half, **rates), Host("b", (slow,) * (devices - half), **rates)
    return Cluster("two hosts", hosts)


def straight(schedule: str, layers: int = 8, recompute: bool = False) -> Plan:
    """Four stages on four devices."""
    bounds = [layers * s // 4 for s in range(5)]
    stages = tuple(
        Stage(range(bounds[s], bounds[s + 1]), (s,), (2,), recompute and s % 2 == 0)
        for s in range(4)
    )
    return Plan(stages, 6, 2, schedule)


def replicated() -> Plan:
    """Three stages, the middle one on two devices with unequal slices."""
    stages = (
        Stage(range(0, 3), (0,), (3,)),
        Stage(range(3, 6), (1, 2), (2, 1)),
        Stage(range(6, 8), (3,), (3,)),
    )
    return Plan(stages, 5, 3, "1f1b")


def looped() -> Plan:
    """Two stages on each of two devices."""
    stages = tuple(Stage(range(2 * s, 2 * s + 2), (s % 2,), (2,)) for s in range(4))
    return Plan(stages, 4, 2, "interleaved")


def emulation(plan: Plan, profile: ModelProfile, **settings: Any) -> Emulation:
    """A rehearsal of two iterations, a little slower than planned."""
    asked = Emulation(plan, profile, two_hosts(), 3.0, 1e-3, 2)
    return replace(asked, **settings)


def weights_first_on_rank_3(emulation: Emulation, server: str, limit_s: float) -> RankRecord:
    """A rank 3 that swaps two actions which send nothing, so that no other rank can notice."""
    right = programs.lower

    def wrong(plan: Plan, boundaries: Any, rank: int, *others: Any, **mode: Any) -> Any:
        found = right(plan, boundaries, rank, *others, **mode)
        steps = list(found.steps)
        if rank == 3:
            places = [i for i, action in enumerate(steps) if action.kind == "W"]
            one, other = places[0], places[1]
            steps[one], steps[other] = steps[other], steps[one]
        return replace(found, steps=tuple(steps))

    programs.lower = wrong
    try:
        return rehearse_rank(emulation, server, limit_s)
    finally:
        programs.lower = right
