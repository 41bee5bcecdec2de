"""ZB-V, V-Half and V-Min: the published bubbles and peaks, other costs and limits.

A slot is what F, I or W take on one of the two stages of a group; `StageCost()` makes it a second.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_strategies import per_stage_costs

from penstock.errors import BadInput
from penstock.schedule.clock import makespan_s, memory_peaks_bytes, times_of
from penstock.schedule.families.v_schedules import v_half, v_min, zb_v
from penstock.schedule.families.zero_bubble_handcrafted import zb_h1, zb_h2
from penstock.schedule.searched.bound import makespan_bound_s
from penstock.schedule.shape import PipelineShape, StageCost, folded
from penstock.schedule.validate import validate

FAMILIES = {"zb-v": zb_v, "v-half": v_half, "v-min": v_min}
ON_A_LINE = {"zb-h1": zb_h1, "zb-h2": zb_h2}

PEAKS: dict[str, Callable[[int], int]] = {
    "zb-v": lambda p: p,
    "v-half": lambda p: p // 2 + 1,
    "v-min": lambda p: (p + 1) // 3 + 1,
}
"""Micro-batches of a group, of its two stages together, until their W has run."""

BUBBLES: dict[str, Callable[[int], int]] = {
    "zb-v": lambda p: p - 1,
    "v-half": lambda p: max(p - 1, 3 * p - 4 if p % 2 else 3 * p - 7),
    "v-min": lambda p: max(p - 1, 4 * p - (7, 5, 9)[p % 3]),
}
"""Slots that the iteration takes beyond a group's work."""

EQUAL = [(p, m) for p in range(2, 9) for m in range(1, 4 * p + 1)]


def on_v(p: int, m: int, cost: StageCost | None = None) -> PipelineShape:
    costs = (cost,) * (2 * p) if cost else ()
    return PipelineShape(2 * p, m, placement=folded(p, rounds=2), costs=costs)


@pytest.mark.parametrize(("p", "m"), EQUAL)
@pytest.mark.parametrize("name", FAMILIES)
def test_it_has_the_bubble_and_the_peak_of_its_closed_form(name: str, p: int, m: int) -> None:
    shape = on_v(p, m)
    schedule = FAMILIES[name](shape)
    # Each of the two stages saves one byte a micro-batch, and keeps it until W.
    peak = max(memory_peaks_bytes(schedule, shape)) / 2
    assert peak == min(PEAKS[name](p), m)
    took = makespan_s(schedule, shape)
    # So few micro-batches that all are in flight at once: what ZB-V takes.
    few = max(6 * m + p - 1, 4 * m + 3 * p - 1, 2 * m + 4 * p - 1)
    assert took == (few if m <= PEAKS[name](p) else 6 * m + BUBBLES[name](p))


@pytest.mark.parametrize("p", [12, 14, 16, 23])
@pytest.mark.parametrize("name", FAMILIES)
def test_longer_pipelines_have_it_too_once_there_are_as_many_micro_batches(
    name: str, p: int
) -> None:
    for m in (p, p + 1, 2 * p, 4 * p):
        shape = on_v(p, m)
        schedule = FAMILIES[name](shape)
        assert makespan_s(schedule, shape) == 6 * m + BUBBLES[name](p)
        assert max(memory_peaks_bytes(schedule, shape)) / 2 == PEAKS[name](p)


@pytest.mark.parametrize(("p", "m"), EQUAL)
def test_no_order_is_faster_than_zb_v_and_no_group_waits_in_it(p: int, m: int) -> None:
    shape = on_v(p, m)
    schedule = zb_v(shape)
    assert makespan_s(schedule, shape) == makespan_bound_s(shape)
    if m >= 2 * p - 1:
        times = times_of(schedule, shape)
        for starts, ends in zip(times.start_s, times.end_s, strict=True):
            assert ends[-1] - starts[0] == 6 * m


@pytest.mark.parametrize(
    "cost",
    [
        StageCost(kept_bytes=0.5),
        StageCost(1.0, 1.25, 0.75),
        StageCost(2.0, 1.0, 1.0),
        StageCost(1.0, 1.5, 1.0),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_peak_stays_with_other_costs(name: str, cost: StageCost) -> None:
    for p in range(2, 9):
        for m in (1, p, 4 * p):
            shape = on_v(p, m, cost)
            schedule = FAMILIES[name](shape)
            assert max(memory_peaks_bytes(schedule, shape)) / 2 <= PEAKS[name](p)
            if name == "v-half":
                # Its bubble stays below that of 1F1B; V-Min's grows with every micro-batch.
                work_s = 2 * (cost.forward_s + cost.backward_s)
                assert makespan_s(schedule, shape) <= (m + p - 1) * work_s + 1e-9


PUBLISHED = {
    (4, 8): ((25.5, 26.5, 29.5), (26.6, 28.4, 34.5)),
    (4, 32): ((97.5, 98.5, 101.5), (101.0, 102.8, 120.85)),
    (8, 16): ((51.5, 56.5, 61.5), (53.8, 60.6, 71.8)),
    (8, 32): ((99.5, 104.5, 109.5), (103.4, 110.2, 129.4)),
    (8, 64): ((195.5, 200.5, 205.5), (202.6, 209.4, 244.6)),
    (16, 32): ((103.5, 116.5, 125.5), (108.2, 125.2, 147.25)),
    (16, 64): ((199.5, 212.5, 221.5), (207.4, 224.4, 262.45)),
}
"""Makespans of the authors' generators, their emitted orders replayed with free transfers, for
F : I : W equal and 1 : 1.2 : 0.9 of a group; they hold the same memory."""


@pytest.mark.parametrize(("p", "m"), PUBLISHED)
def test_it_takes_no_longer_than_the_authors_generators(p: int, m: int) -> None:
    for cost, published in zip(
        (StageCost(0.5, 0.5, 0.5), StageCost(0.5, 0.6, 0.45)), PUBLISHED[p, m], strict=True
    ):
        shape = on_v(p, m, cost)
        for family, most_s in zip(FAMILIES.values(), published, strict=True):
            assert makespan_s(family(shape), shape) <= most_s + 1e-9


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_limits_are_kept_as_long_as_one_micro_batch_fits(data: st.DataObject) -> None:
    p, m, rounds = (data.draw(st.integers(1, most)) for most in (5, 9, 2))
    per_stage = {"min_size": rounds * p, "max_size": rounds * p}
    limits = st.lists(st.integers(1, 4), **per_stage).map(tuple)
    room = st.lists(st.sampled_from([3.0, 4.5, 9.0]), min_size=p, max_size=p)
    shape = PipelineShape(
        rounds * p,
        m,
        placement=folded(p, rounds),
        costs=data.draw(st.lists(per_stage_costs, **per_stage).map(tuple)),
        in_flight_limit=data.draw(st.one_of(st.just(()), limits)),
        recompute=data.draw(st.lists(st.booleans(), **per_stage).map(tuple)),
        memory_bytes=tuple(each * rounds for each in data.draw(st.one_of(st.just([]), room))),
    )
    for name, family in (FAMILIES if rounds == 2 else ON_A_LINE).items():
        schedule = family(shape)
        validate(schedule, shape)
        assert makespan_s(schedule, shape) >= makespan_bound_s(shape) - 1e-9
        if rounds == 2:
            kept = (replace(c, saved_bytes=1.0, kept_bytes=None) for c in shape.costs)
            equal = replace(shape, costs=tuple(kept))
            assert max(memory_peaks_bytes(schedule, equal)) / 2 <= PEAKS[name](p)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_says_what_does_not_fit(name: str) -> None:
    tight = replace(on_v(2, 3, StageCost(saved_bytes=4.0)), memory_bytes=(9.0, 7.0))
    with pytest.raises(BadInput, match=r"saves 8 bytes .* group 1, which has room for 7"):
        FAMILIES[name](tight)
    with pytest.raises(BadInput, match=rf"'{name}' .* folded placement"):
        FAMILIES[name](PipelineShape(4, 3, placement=(1, 0, 0, 1)))
    with pytest.raises(BadInput, match=rf"'{name}' .* two stages a group"):
        FAMILIES[name](PipelineShape(6, 3, placement=folded(2, rounds=3)))
