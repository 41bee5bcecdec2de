"""Concurrent schedules where a device does one thing at a time."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import small_shapes

from penstock.schedule.clock import makespan_s, times_of
from penstock.schedule.concurrent_clock import one_at_a_time
from penstock.schedule.families.bapipe_orders import fbp_as
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import in_flight_peaks, validate


@st.composite
def shapes(draw: st.DrawFn) -> PipelineShape:
    """Up to six stages, some of which recompute, with costs that may be nothing at all."""
    shape = draw(small_shapes(most_groups=6, most_micro_batches=14, style="straight"))
    drawn = st.lists(st.booleans(), min_size=shape.stages, max_size=shape.stages)
    recompute = draw(st.one_of(st.just(()), drawn.map(tuple)))
    return replace(shape, recompute=recompute, in_flight_limit=(), memory_bytes=())


@given(shapes())
def test_the_merged_order_can_be_played_and_holds_no_more(shape: PipelineShape) -> None:
    both = fbp_as(shape)
    peaks = in_flight_peaks(both, shape)
    one = one_at_a_time(both, shape)
    assert not one.concurrent
    validate(one, replace(shape, in_flight_limit=peaks))
    for before, after in zip(both.orders, one.orders, strict=True):
        for kind in "FB":
            kept = [action for action in before if action.kind == kind]
            assert kept == [action for action in after if action.kind == kind]


@given(shapes())
def test_it_is_the_order_of_the_clock(shape: PipelineShape) -> None:
    shape = replace(shape, recompute=())
    both = fbp_as(shape)
    times = times_of(both, shape)
    one = one_at_a_time(both, shape)
    for order, starts, merged in zip(both.orders, times.start_s, one.orders, strict=True):
        start_s = dict(zip(order, starts.tolist(), strict=True))
        moments = [start_s[action] for action in merged]
        assert moments == sorted(moments)


def test_equal_stages_take_as_long_as_side_by_side() -> None:
    """(M + S - 1) (F + B): sharing a device makes no work quicker."""
    for stages in (1, 2, 3, 4, 6):
        for micro_batches in (1, 2, 5, 12):
            shape = PipelineShape(stages, micro_batches)
            one = one_at_a_time(fbp_as(shape), shape)
            assert makespan_s(one, shape) == (micro_batches + stages - 1) * 3


def test_other_schedules_stay_as_they_are() -> None:
    shape = PipelineShape(3, 5)
    schedule = one_f_one_b(shape)
    assert one_at_a_time(schedule, shape) is schedule
