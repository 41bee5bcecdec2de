"""Hypothesis strategies for planning: small profiles, clusters and problems."""

from dataclasses import replace

from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import (
    Affine,
    Edge,
    LayerCost,
    ModelProfile,
    SharedParameter,
)

# Whole numbers and halves: sums are exact, so a limit is met or missed alike in any order of work.
figures = st.integers(0, 8).map(lambda n: n / 2)
positive_figures = st.integers(1, 8).map(lambda n: n / 2)
# Links so slow that transfers count, or so fast that only computing does.
rates = positive_figures | st.just(1e12)


def affine(scale: float = 1.0) -> st.SearchStrategy[Affine]:
    """A cost that is positive for one sample."""
    return st.builds(lambda f, p: Affine(f * scale, p * scale), figures, positive_figures)


@st.composite
def layers(draw: st.DrawFn, index: int) -> LayerCost:
    """One layer."""
    return LayerCost(
        name=f"layer{index}",
        forward_s=draw(affine()),
        backward_input_s=draw(affine()),
        backward_weight_s=draw(affine()),
        parameter_bytes=draw(st.integers(0, 10)),
        buffer_bytes=draw(st.integers(0, 2)),
        saved_bytes=draw(affine()),
        workspace_bytes=draw(affine(0.5)),
        norms=(norms := draw(st.sampled_from([0, 0, 1, 2]))),
        norm_channels=4 * norms,
    )


@st.composite
def profiles(draw: st.DrawFn, max_layers: int = 4) -> ModelProfile:
    """A chain with some skip edges and perhaps a tied parameter."""
    count = draw(st.integers(1, max_layers))
    pairs = [(i, i + 1) for i in range(count - 1)]
    skips = [(i, j) for i in range(count) for j in range(i + 2, count)]
    chosen = draw(st.lists(st.sampled_from(skips), unique=True)) if skips else []
    sizes = [(draw(affine()), draw(affine())) for _ in range(count)]
    edges = tuple(Edge(i, j, f"tensor{i}", *sizes[i]) for i, j in (*pairs, *chosen))
    tied = draw(st.booleans()) and count > 1
    shared = (SharedParameter("tied", draw(st.integers(1, 9)), (0, count - 1)),) if tied else ()
    return ModelProfile(
        name="drawn",
        layers=tuple(draw(layers(i)) for i in range(count)),
        edges=edges,
        shared=shared,
        batch_size=8,
        step_s_per_byte=draw(figures),
        statistics_s=draw(figures),
    )


@st.composite
def clusters(draw: st.DrawFn, max_devices: int = 3, memory: bool = True) -> Cluster:
    """Up to two hosts, with devices that may differ in speed, memory and what the chip holds."""
    counts = draw(
        st.sampled_from([c for c in ((1,), (2,), (3,), (1, 1), (2, 1)) if sum(c) <= max_devices])
    )
    memories = st.integers(8, 200).map(float) if memory else st.just(1e9)
    plain = st.builds(Device, st.just("drawn"), memories, st.sampled_from([1.0, 2.0]))
    chip, rate = st.sampled_from([2.0, 8.0]), st.sampled_from([1.0, 4.0])
    small = st.builds(
        lambda device, held, rate: replace(device, on_chip_bytes=held, off_chip_bytes_per_s=rate),
        plain,
        chip,
        rate,
    )
    devices = plain if draw(st.integers(0, 3)) else plain | small
    hosts = tuple(
        Host(
            name=f"host{i}",
            devices=tuple(draw(devices) for _ in range(count)),
            link_bytes_per_s=draw(rates),
            port_bytes_per_s=draw(rates),
            link_latency_s=draw(figures),
            port_latency_s=draw(figures),
            full_speed_devices=draw(st.integers(0, 2)),
        )
        for i, count in enumerate(counts)
    )
    return Cluster("drawn", hosts)


@st.composite
def problems(
    draw: st.DrawFn, max_layers: int = 4, memory: bool = True, divided: bool = False
) -> PlanningProblem:
    """A problem small enough to enumerate; ``divided``: all stages may have to divide something.

    Stages that divide their parameters must not share any (`penstock.plan.choices`).
    """
    sharding = draw(st.sampled_from(["off", "optimizer", "parameters"])) if divided else "off"
    profile = draw(profiles(max_layers))
    return PlanningProblem(
        profile=replace(profile, shared=()) if sharding == "parameters" else profile,
        cluster=draw(clusters(memory=memory)),
        global_batch=4,
        micro_batch_sizes=draw(st.sampled_from([(1,), (2,), (4,), (1, 2, 4)])),
        recompute=draw(st.sampled_from(["auto", "on", "off"])),
        sharding=sharding,
        schedules=draw(st.sampled_from([("1f1b",), ("gpipe",), ("1f1b", "gpipe")])),
    )
