"""Hypothesis strategies: small pipelines with unequal stages."""

from dataclasses import replace

from hypothesis import strategies as st

from penstock.schedule.shape import PipelineShape, PlacementStyle, StageCost, placement_of_style

STYLES: tuple[PlacementStyle, ...] = ("straight", "looped", "folded", "mirrored")

per_stage_costs = st.builds(
    StageCost,
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from([None, 0.0, 0.5]),
).map(lambda c: replace(c, kept_bytes=min(c.bytes_until_weight_backward, c.saved_bytes)))
"""Costs that may be zero, with transfers, and less kept until W than saved."""


@st.composite
def small_shapes(
    draw: st.DrawFn,
    *,
    most_groups: int = 3,
    most_micro_batches: int = 4,
    style: PlacementStyle | None = None,
) -> PipelineShape:
    """Unequal stages in any placement, some without a cost, some with little memory."""
    chosen = draw(st.sampled_from(STYLES)) if style is None else style
    groups = draw(st.integers(1, most_groups))
    rounds = 2 if chosen in ("looped", "folded") else 1
    placement = placement_of_style(chosen, groups, rounds)
    stages = len(placement)
    micro_batches = draw(st.integers(1, most_micro_batches))
    seconds = st.one_of(st.integers(1, 20).map(lambda n: n / 8), st.sampled_from([0.0, 1 / 3]))
    saved = st.sampled_from([0.5, 1.0, 1.5])
    costs = tuple(
        StageCost(*(draw(seconds) for _ in range(4)), b, b * draw(st.sampled_from([0.5, 1.0])))
        for b in draw(st.lists(saved, min_size=stages, max_size=stages))
    )
    mirrored = chosen == "mirrored"
    limits = st.lists(st.integers(1, micro_batches), min_size=stages, max_size=stages)
    roomy = st.lists(st.sampled_from([3.0, 4.25, 6.0]), min_size=groups, max_size=groups)
    return PipelineShape(
        stages,
        micro_batches,
        placement=placement,
        in_flight_limit=draw(st.one_of(st.just(()), limits.map(tuple))),
        costs=costs,
        memory_bytes=draw(st.one_of(st.just(()), roomy.map(tuple))),
        mirrored=mirrored,
    )
