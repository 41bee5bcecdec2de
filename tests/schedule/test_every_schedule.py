"""What holds for every schedule of the registry, on any pipeline that it accepts."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_shapes import placed

from penstock.errors import BadInput
from penstock.plan.ordering import has_forwards_first
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import parse_schedule
from penstock.schedule.shape import PipelineShape, PlacementStyle, StageCost, placement_of_style
from penstock.schedule.validate import in_flight_peaks, validate
from penstock.schedule.weight_rule import SYNCHRONOUS

FIXED_ORDER = ("gpipe", "breadth-first", "dualpipe", "dualpipe-v", "fbp-as")
"""Schedules of one order: they are refused where that holds more than a limit allows."""

LITTLE_ROOM = ("interleaved", "hanayo", "chimera")
"""Schedules that give way to some limits; all others give way to any."""


def style_of(name: str) -> PlacementStyle:
    return FAMILIES[name].placement


def rounds_of(name: str) -> tuple[int, ...]:
    """How many stages a device group of a family may hold."""
    if FAMILIES[name].rounds == 2:
        return (2,)
    return (1, 2, 3, 4) if style_of(name) in ("looped", "folded") else (1,)


@st.composite
def shapes(draw: st.DrawFn, name: str) -> PipelineShape:
    """Up to six groups and ten micro-batches, with limits, recompute and costs on some."""
    groups = draw(st.integers(1, 6))
    placement = placement_of_style(style_of(name), groups, draw(st.sampled_from(rounds_of(name))))
    stages = len(placement)
    micro_batches = draw(st.integers(1, 10))
    per_stage = {"min_size": stages, "max_size": stages}
    limits = st.lists(st.integers(1, micro_batches + 2), **per_stage).map(tuple)
    recompute = st.lists(st.booleans(), **per_stage).map(tuple)
    seconds = st.sampled_from([0.5, 1.0, 1.75])
    costs = st.lists(st.builds(StageCost, seconds, seconds, seconds, seconds), **per_stage)
    return PipelineShape(
        stages,
        micro_batches,
        placement=placement,
        in_flight_limit=draw(st.one_of(st.just(()), limits)),
        recompute=draw(st.one_of(st.just(()), recompute)),
        costs=draw(st.one_of(st.just(()), costs.map(tuple))),
        mirrored=style_of(name) == "mirrored",
    )


@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if family.forwards_first])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_family_that_says_so_has_the_last_stages_forwards_first(
    name: str, data: st.DataObject
) -> None:
    shape = data.draw(shapes(name))
    try:
        schedule = FAMILIES[name].make(shape)
    except BadInput:
        assume(False)
    else:
        assert has_forwards_first(schedule, shape.stages - 1)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_it_can_be_played_within_its_limits_or_is_refused(name: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(name))
    refusing = FIXED_ORDER + LITTLE_ROOM
    free = replace(shape, in_flight_limit=())
    peaks = in_flight_peaks(FAMILIES[name].make(free), free) if name in refusing else ()
    fits = all(peak <= shape.limit(stage) for stage, peak in enumerate(peaks))
    try:
        schedule = FAMILIES[name].make(shape)
    except BadInput:
        assert not fits
        return
    assert fits or name not in FIXED_ORDER
    validate(schedule, shape)
    for stage, peak in enumerate(in_flight_peaks(schedule, shape)):
        assert 1 <= peak <= shape.limit(stage)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_accepts_every_pipeline_without_limits(name: str) -> None:
    for groups in range(1, 7):
        for rounds in rounds_of(name):
            for micro_batches in range(1, 9):
                shape = placed(style_of(name), groups, micro_batches, rounds)
                validate(FAMILIES[name].make(shape), shape)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_it_does_the_work_of_every_micro_batch_once_and_reads_back_from_text(
    name: str, data: st.DataObject
) -> None:
    shape = data.draw(shapes(name))
    assume(not shape.in_flight_limit)
    schedule = FAMILIES[name].make(shape)
    kinds = Counter((a.stage, a.kind) for order in schedule.orders for a in order)
    family = FAMILIES[name]
    assert family.splits or not any(kind == "I" for _, kind in kinds)
    assert family.flushes == (schedule.weights == SYNCHRONOUS)
    for stage in range(shape.stages):
        assert kinds[stage, "F"] == shape.micro_batches
        assert kinds[stage, "B"] + kinds[stage, "I"] == shape.micro_batches
        assert kinds[stage, "R"] <= shape.micro_batches * shape.recomputes(stage)
    assert parse_schedule(str(schedule)).orders == schedule.orders


# Those that are searched for take any placement.
@pytest.mark.parametrize("name", [name for name in FAMILIES if not FAMILIES[name].is_searched])
def test_it_refuses_a_placement_that_is_not_its_own(name: str) -> None:
    # Neither to and fro nor round and round, nor one stage a group.
    placement = (0, 0, 1, 0)
    with pytest.raises(BadInput, match=r"plac"):
        FAMILIES[name].make(PipelineShape(len(placement), 4, placement=placement))


@pytest.mark.parametrize(
    ("name", "plain"), [("hanayo", "1f1b"), ("interleaved", "1f1b"), ("breadth-first", "gpipe")]
)
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_with_one_stage_a_group_it_is_the_plain_order(
    name: str, plain: str, micro_batches: int
) -> None:
    shape = PipelineShape(4, micro_batches)
    assert FAMILIES[name].make(shape) == FAMILIES[plain].make(shape)


ONE, TIGHT = {"in_flight_limit": (1,) * 4}, {"memory_bytes": (3.0, 9.0)}


@pytest.mark.parametrize(
    ("name", "groups", "limits", "words"),
    [
        ("gpipe", 4, {"in_flight_limit": (6, 3, 6, 6)}, "'gpipe'.*stage 1.*limit is 3.*1f1b"),
        ("hanayo", 2, ONE, "'hanayo' with 6 micro-batches.*in-flight limit is 1"),
        ("interleaved", 2, ONE, "'interleaved' with 6 micro-batches holds 4 on stage 0"),
        ("interleaved", 2, TIGHT, "saves 4 bytes on device group 0.*room for 3"),
        ("breadth-first", 2, {"in_flight_limit": (6, 6, 2, 6)}, "holds 6 on stage 2.*limit is 2"),
        ("chimera", 4, ONE, "'chimera' with 6 micro-batches.*in-flight limit is 1"),
        ("dualpipe", 4, ONE, "'dualpipe'.*in-flight limit is 1"),
        ("dualpipe-v", 2, TIGHT, "'dualpipe-v'.*room for 3"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(
    name: str, groups: int, limits: dict[str, tuple[float, ...]], words: str
) -> None:
    shape = replace(placed(style_of(name), groups, 6, 4 // groups), **limits)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=words):
        FAMILIES[name].make(shape)
