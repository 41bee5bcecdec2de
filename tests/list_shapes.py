"""Pipelines for the list schedulers: any placement, costs, limits, and memory down to the least."""

from dataclasses import replace

from hypothesis import strategies as st

from penstock.schedule.shape import PipelineShape, StageCost, folded, looped


def least_memory_bytes(shape: PipelineShape) -> list[float]:
    """What a single micro-batch saves on each group, of the way that saves more."""
    ways = (0, 1) if shape.mirrored and shape.micro_batches > 1 else (0,)
    saved = {s: shape.cost(s).saved_bytes for s in range(shape.stages)}
    return [
        max(sum(saved[s] for s in saved if shape.group_of(s, way) == group) for way in ways)
        for group in range(shape.groups)
    ]


@st.composite
def list_shapes(draw: st.DrawFn) -> PipelineShape:
    """Up to five groups, eight stages and twelve micro-batches; stages in no order too."""
    groups = draw(st.integers(1, 5))
    rounds = draw(st.integers(1, 3 if groups < 3 else 2))
    places = [
        st.just(looped(groups, rounds)),
        st.just(folded(groups, rounds)),
        st.permutations(looped(groups, rounds)).map(tuple),
    ]
    placement = draw(st.one_of(places))
    stages, micro_batches = len(placement), draw(st.integers(1, 12))
    seconds = st.sampled_from([0.0, 1 / 3, 0.5, 0.9, 1.0, 1.2, 2.0])
    costs = tuple(
        StageCost(
            *(draw(seconds) for _ in range(3)),
            transfer_s=draw(st.sampled_from([0.0, 0.1, 3.0])),
            saved_bytes=saved,
            kept_bytes=draw(st.sampled_from([None, 0.0, saved / 2, saved])),
        )
        for saved in draw(
            st.lists(st.sampled_from([0.1, 1 / 3, 1.0, 2.0]), min_size=stages, max_size=stages)
        )
    )
    per_stage = {"min_size": stages, "max_size": stages}
    mirrored = draw(st.booleans())
    # A mirrored stage may meet itself on the middle group, and then holds one of each way.
    limits = st.lists(st.integers(1 + mirrored, micro_batches + 2), **per_stage).map(tuple)
    shape = PipelineShape(
        stages,
        micro_batches,
        placement,
        in_flight_limit=draw(st.one_of(st.just(()), limits)),
        recompute=tuple(draw(st.one_of(st.just([]), st.lists(st.booleans(), **per_stage)))),
        costs=costs,
        mirrored=mirrored,
    )
    if draw(st.booleans()):
        return shape
    more = st.sampled_from([1.0, 1.0, 1.3, 2.0, 4.0])
    memory_bytes = tuple(least * draw(more) for least in least_memory_bytes(shape))
    return replace(shape, memory_bytes=memory_bytes)
