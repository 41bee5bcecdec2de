"""ZB-H1 and ZB-H2: the published bubbles and peaks, W in the gaps of any costs."""

import pytest

from penstock.errors import BadInput
from penstock.schedule.clock import makespan_s, times_of
from penstock.schedule.families.zero_bubble_handcrafted import zb_h1, zb_h2
from penstock.schedule.schedule import Schedule, ScheduleFunction
from penstock.schedule.searched.bound import makespan_bound_s
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.schedule.validate import in_flight_peaks

FAMILIES = {"zb-h1": zb_h1, "zb-h2": zb_h2}

EQUAL = [(p, m) for p in range(2, 9) for m in range(1, 4 * p + 1)]


def idle_s(schedule: Schedule, shape: PipelineShape) -> list[float]:
    """Seconds that each group waits from its first start to its last end."""
    times = times_of(schedule, shape)
    return [
        ends[-1] - starts[0] - float((ends - starts).sum())
        for starts, ends in zip(times.start_s, times.end_s, strict=True)
    ]


def forwards_before_the_first_backward(schedule: Schedule) -> list[int]:
    return [[a.kind for a in order].index("I") for order in schedule.orders]


@pytest.mark.parametrize(("p", "m"), EQUAL)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_no_order_is_faster_where_f_i_and_w_are_equal(
    family: ScheduleFunction, p: int, m: int
) -> None:
    shape = PipelineShape(p, m)
    took_s = makespan_s(family(shape), shape)
    assert took_s == max(3 * m + p - 1, 2 * m + 2 * p - 1)
    assert took_s == makespan_bound_s(shape)


@pytest.mark.parametrize(("p", "m"), EQUAL)
@pytest.mark.parametrize(("family", "slope"), [(zb_h1, 1), (zb_h2, 2)])
def test_it_has_the_published_bubble_peak_and_warm_up(
    family: ScheduleFunction, slope: int, p: int, m: int
) -> None:
    shape = PipelineShape(p, m)
    schedule = family(shape)
    warm_up = [min(slope * (p - 1 - s) + 1, m) for s in range(p)]
    assert forwards_before_the_first_backward(schedule) == warm_up
    assert max(in_flight_peaks(schedule, shape)) == warm_up[0]
    if m > slope * (p - 1):
        # (p - 1) (F + I - W), or less another W, with F = I = W: then a parallelogram.
        idle = idle_s(schedule, shape)
        assert idle[0] == (p - 1) * (2 - slope)
        assert slope == 1 or idle == [0.0] * p


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 32), (8, 16), (8, 64), (16, 32), (16, 64)])
def test_other_costs_take_no_longer_than_the_authors_generators(p: int, m: int) -> None:
    # Makespans of their emitted orders with F : I : W = 1 : 1.2 : 0.9, replayed with free
    # transfers; one and two times the memory of 1F1B.
    published = {
        (4, 8): (28.7, 27.8),
        (4, 32): (103.1, 102.2),
        (8, 16): (58.7, 56.6),
        (8, 64): (207.5, 205.4),
        (16, 32): (118.7, 114.2),
        (16, 64): (217.9, 213.4),
    }
    shape = PipelineShape(p, m, costs=(StageCost(1.0, 1.2, 0.9),) * p)
    for family, most_s in zip(FAMILIES.values(), published[p, m], strict=True):
        assert makespan_s(family(shape), shape) <= most_s + 1e-9


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_w_is_not_put_where_it_would_hold_others_up(
    family: ScheduleFunction,
) -> None:
    # W is three times as long as the gaps before the drain.
    shape = PipelineShape(4, 4, costs=(StageCost(1.0, 1.0, 3.0),) * 4)
    assert makespan_s(family(shape), shape) == makespan_bound_s(shape)


def test_it_says_what_does_not_fit() -> None:
    costs = (StageCost(saved_bytes=8.0),) * 2
    with pytest.raises(BadInput, match=r"stage 1 saves 8 bytes .* room for 7"):
        zb_h1(PipelineShape(2, 3, costs=costs, memory_bytes=(9.0, 7.0)))
    with pytest.raises(BadInput, match=r"stage 0 has an in-flight limit of 0"):
        zb_h2(PipelineShape(2, 3, in_flight_limit=(0, 2)))
    with pytest.raises(BadInput, match=r"'zb-h1' .* straight placement"):
        zb_h1(PipelineShape(4, 3, placement=(0, 1, 1, 0)))
