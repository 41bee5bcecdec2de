"""Hypothesis strategies: problems of which every plan can be tried, hard in every way there is."""

from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile, SharedParameter

MEGABYTE = 1_000_000

# Layers, devices by host, batch and micro-batch sizes: few enough plans to try them all.
SIZES: tuple[tuple[int, tuple[int, ...], int, tuple[int, ...]], ...] = (
    (6, (2,), 4, (2,)),
    (6, (1, 1), 4, (1, 2)),
    (4, (1, 1, 1), 3, (1, 3)),
    (4, (2, 1), 2, (1, 2)),
    (3, (3,), 3, (3,)),
    (3, (1, 1), 8, (2, 4, 8)),
    (2, (2, 2), 4, (4,)),
    (3, (2, 2), 2, (1, 2)),
    (2, (1, 3), 3, (3,)),
    (4, (1, 1, 1, 1), 2, (1,)),
)

seconds = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.7, 3.0])
rates = st.sampled_from([1e12, 50 * MEGABYTE, 20 * MEGABYTE, 5 * MEGABYTE, 8.0, 3.0])


@st.composite
def affine(draw: st.DrawFn, scale: float = 1.0) -> Affine:
    """A cost with and without a fixed part, sometimes none."""
    fixed, per_sample = draw(seconds), draw(seconds)
    return Affine(fixed * scale * draw(st.sampled_from([0, 0, 1])), per_sample * scale)


@st.composite
def bound_profiles(draw: st.DrawFn, layers: int) -> ModelProfile:
    """Unequal layers with gradients beyond a bucket, skips, whole tensors and tied parameters."""
    normed = draw(st.booleans())
    costs = tuple(
        LayerCost(
            f"layer{i}",
            draw(affine()),
            draw(affine()),
            draw(affine()),
            draw(st.sampled_from([0, 0, 3, 20, 70, 120])) * MEGABYTE,
            0,
            draw(affine()),
            draw(affine(0.5)),
            norms=2 * (i % 2) * normed,
            norm_channels=1000 * (i % 2) * normed,
        )
        for i in range(layers)
    )
    scale = draw(st.sampled_from([1.0, 10.0, 30.0]))
    edges: list[Edge] = []
    for i in range(layers - 1):
        whole = Affine(scale, 0.0)
        size = draw(st.one_of(affine(scale), affine(scale), st.just(whole)))
        gradient = draw(st.one_of(st.just(size), st.just(Affine()), affine(scale)))
        readers = {i + 1, draw(st.integers(i + 1, layers - 1))}
        if draw(st.integers(0, 4)) == 0:
            readers = set(range(i + 1, layers))
        edges += [Edge(i, reader, f"tensor{i}", size, gradient) for reader in sorted(readers)]
    tied = draw(st.sampled_from([0, 0, 40])) * MEGABYTE if layers > 1 else 0
    shared = (SharedParameter("tied", tied, (0, layers - 1)),) if tied else ()
    step_s_per_byte = draw(st.sampled_from([0.0, 1e-8]))
    return ModelProfile(
        "drawn", costs, tuple(edges), shared, batch_size=8, step_s_per_byte=step_s_per_byte
    )


@st.composite
def bound_clusters(draw: st.DrawFn, counts: tuple[int, ...]) -> Cluster:
    """Unequal devices, slow ports, links that differ in their directions, scarce memory."""
    speeds = draw(st.sampled_from([(1.0,), (1.0, 2.0), (1.0, 0.5, 0.7)]))
    memories = draw(st.sampled_from([(1e12,), (1e12,), (80e6, 300e6, 900e6)]))
    device = st.builds(
        Device,
        st.just("drawn"),
        st.sampled_from(memories),
        st.sampled_from(speeds),
        concurrent_passes=st.sampled_from([False, False, True]),
    )
    latencies = st.sampled_from([0.0, 0.0, 0.1, 0.5])
    hosts = tuple(
        Host(
            f"host{i}",
            tuple(draw(device) for _ in range(count)),
            draw(rates),
            draw(rates),
            draw(latencies),
            draw(latencies),
            draw(st.sampled_from([0, 0, 1])),
            half_duplex=draw(st.sampled_from([False, False, True])),
            separate_links=draw(st.sampled_from([False, False, True])),
        )
        for i, count in enumerate(counts)
    )
    pairs = [(i, j) for i in range(sum(counts)) for j in range(sum(counts)) if i != j]
    linked = draw(st.lists(st.sampled_from(pairs), unique=True)) if len(pairs) else []
    links = tuple(Link(i, j, draw(rates), draw(latencies)) for i, j in linked)
    step_s = draw(st.sampled_from([0.0, 0.0, 0.2]))
    return Cluster("drawn", hosts, links if draw(st.booleans()) else (), sum_step_s=step_s)


@st.composite
def bound_problems(draw: st.DrawFn) -> PlanningProblem:
    """A problem of a size from the list."""
    layers, counts, batch, sizes = draw(st.sampled_from(SIZES))
    return PlanningProblem(
        draw(bound_profiles(draw(st.integers(1, layers)))),
        draw(bound_clusters(counts)),
        batch,
        sizes,
        recompute=draw(st.sampled_from(["auto", "on", "off"])),
        schedules=draw(
            st.sampled_from([("1f1b", "early-backward", "gpipe"), ("1f1b",), ("gpipe",)])
        ),
    )


@st.composite
def slow_link_problems(draw: st.DrawFn) -> PlanningProblem:
    """Chains on two or three hosts whose links take about as long as the work, or much longer."""
    counts = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 1, 1)]))
    batch, layers = draw(st.sampled_from([2, 3, 4])), draw(st.integers(2, 3))
    costs = [draw(st.sampled_from([0.5, 1.0, 1.0, 3.0])) for _ in range(layers)]
    # Links pass a megabyte a second: bytes are given by their seconds, as shares of all work.
    scale = 3 * batch * sum(costs) * MEGABYTE
    shares = st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0, 100.0])
    layer = [
        LayerCost(
            f"layer{i}",
            *(Affine(per_sample=cost) for _ in range(3)),
            parameter_bytes=round(draw(shares) * scale),
        )
        for i, cost in enumerate(costs)
    ]
    sizes = [
        Affine(per_sample=draw(st.sampled_from([0.02, 0.1, 0.2, 0.4, 2.0])) * scale / batch)
        for _ in range(layers - 1)
    ]
    edges = [Edge(i, i + 1, f"tensor{i}", size, size) for i, size in enumerate(sizes)]
    if layers == 3 and draw(st.booleans()):
        edges.append(Edge(0, 2, "tensor0", sizes[0], sizes[0]))
    memory = draw(st.sampled_from([1e15, 1e15, 2 * scale]))
    half_duplex = draw(st.booleans())
    hosts = tuple(
        Host(
            f"host{number}",
            (Device("drawn", memory, draw(st.sampled_from([1.0, 1.0, 2.0]))),) * count,
            1e12,
            draw(st.sampled_from([1.0, 1.0, 2.0])) * MEGABYTE,
            half_duplex=half_duplex,
        )
        for number, count in enumerate(counts)
    )
    return PlanningProblem(
        ModelProfile("drawn", tuple(layer), tuple(edges)),
        Cluster("drawn", hosts),
        batch,
        (1, batch),
        recompute="off",
        schedules=("1f1b", "early-backward", "gpipe", "zb-h2"),
    )
