"""Chimera: its published bubbles and memory, and pipelines that the paper does not have."""

import pytest
from schedule_shapes import bubble_s, every_small_shape, placed

from penstock.schedule.clock import memory_peaks_bytes
from penstock.schedule.families.chimera import chimera, in_units
from penstock.schedule.schedule import ScheduleFunction
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.schedule.validate import validate

EQUAL = StageCost(1.0, 0.5, 0.5)
DOUBLE = StageCost(1.0, 1.0, 1.0)


def test_units_can_be_played_on_every_small_pipeline() -> None:
    for shape in every_small_shape("mirrored"):
        validate(in_units(shape), shape)


@pytest.mark.parametrize("groups", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("units", [1, 2, 5])
@pytest.mark.parametrize("function", [chimera, in_units])
def test_the_bubble_is_the_published_one_for_equal_halves(
    function: ScheduleFunction, groups: int, units: int
) -> None:
    shape = placed("mirrored", groups, units * groups, cost=EQUAL)
    assert bubble_s(function(shape), shape) == groups - 2


@pytest.mark.parametrize("groups", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("units", [1, 2, 5])
def test_only_units_idle_longer_the_more_there_are(groups: int, units: int) -> None:
    # The published fraction (D - 2) / (3 N / 2 + D - 2) for B = 2 F is that of one unit, N = D.
    shape = placed("mirrored", groups, units * groups, cost=DOUBLE)
    assert bubble_s(chimera(shape), shape) == 2 * (groups - 2)
    assert bubble_s(in_units(shape), shape) == (groups - 2) * (units + 1)


@pytest.mark.parametrize("groups", [2, 4, 6, 8])
def test_one_unit_is_the_published_one(groups: int) -> None:
    for micro_batches in range(1, groups + 1):
        shape = placed("mirrored", groups, micro_batches)
        assert chimera(shape) == in_units(shape)


@pytest.mark.parametrize("groups", [2, 4, 6, 8])
def test_groups_hold_at_most_as_many_micro_batches_as_there_are_groups(groups: int) -> None:
    shape, unit = placed("mirrored", groups, 3 * groups), placed("mirrored", groups, groups)
    first_half = tuple(range(groups // 2 + 1, groups + 1))
    published = first_half + first_half[::-1]
    assert memory_peaks_bytes(chimera(unit), unit) == published
    assert memory_peaks_bytes(in_units(shape), shape) == published
    assert max(memory_peaks_bytes(chimera(shape), shape)) == groups


@pytest.mark.parametrize("groups", [3, 5, 7, 9])
@pytest.mark.parametrize("micro_batches", [9, 10, 36])
def test_an_odd_number_of_groups_idles_half_as_long_as_in_one_f_one_b(
    groups: int, micro_batches: int
) -> None:
    shape = placed("mirrored", groups, 2 * micro_batches, cost=EQUAL)
    assert bubble_s(chimera(shape), shape) == groups - 1


def test_a_last_unit_that_is_not_full_is_a_full_one_without_the_rest() -> None:
    for function in (chimera, in_units):
        few, full = function(placed("mirrored", 4, 6)), function(placed("mirrored", 4, 8))
        for order, whole in zip(few.orders, full.orders, strict=True):
            assert list(order) == [action for action in whole if action.micro_batch < 6]


def test_limits_that_need_it_get_units() -> None:
    unit = placed("mirrored", 6, 18)
    shape = PipelineShape(6, 18, mirrored=True, memory_bytes=(4.0, 5.0, 6.0, 6.0, 5.0, 4.0))
    assert chimera(shape) == in_units(unit) != chimera(unit)
