"""Chimera: its published bubbles and memory, and pipelines that the paper does not have."""

import pytest
from schedule_shapes import bubble_s, every_small_shape, placed

from penstock.errors import BadInput
from penstock.schedule.chimera import chimera
from penstock.schedule.clock import memory_peaks_bytes
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.schedule.validate import validate

EQUAL = StageCost(1.0, 0.5, 0.5)
DOUBLE = StageCost(1.0, 1.0, 1.0)


def test_every_small_pipeline_can_be_played() -> None:
    for shape in every_small_shape("mirrored"):
        validate(chimera(shape), shape)


@pytest.mark.parametrize("groups", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("units", [1, 2, 5])
def test_the_bubble_is_the_published_one_for_equal_halves(groups: int, units: int) -> None:
    shape = placed("mirrored", groups, units * groups, cost=EQUAL)
    assert bubble_s(chimera(shape), shape) == groups - 2


@pytest.mark.parametrize("groups", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("units", [1, 2, 5])
def test_a_backward_of_two_forwards_idles_between_units(groups: int, units: int) -> None:
    # The published fraction (D - 2) / (3 N / 2 + D - 2) is that of one unit, N = D.
    shape = placed("mirrored", groups, units * groups, cost=DOUBLE)
    assert bubble_s(chimera(shape), shape) == (groups - 2) * (units + 1)


@pytest.mark.parametrize("groups", [2, 4, 6, 8])
def test_groups_hold_between_half_and_all_of_a_unit(groups: int) -> None:
    shape = placed("mirrored", groups, 3 * groups)
    half = groups // 2
    first_half = tuple(range(half + 1, groups + 1))
    assert memory_peaks_bytes(chimera(shape), shape) == first_half + first_half[::-1]


@pytest.mark.parametrize("groups", [3, 5, 7, 9])
def test_an_odd_number_of_groups_idles_less_than_one_f_one_b(groups: int) -> None:
    shape = placed("mirrored", groups, 4 * (groups + 1), cost=EQUAL)
    assert bubble_s(chimera(shape), shape) < 2 * (groups - 1)


def test_a_unit_that_is_not_full_is_the_full_one_without_the_rest() -> None:
    few, full = chimera(placed("mirrored", 4, 6)), chimera(placed("mirrored", 4, 8))
    for order, whole in zip(few.orders, full.orders, strict=True):
        assert list(order) == [action for action in whole if action.micro_batch < 6]


def test_a_limit_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(BadInput, match=r"'chimera' with 4 micro-batches.*in-flight limit is 1"):
        chimera(PipelineShape(4, 4, in_flight_limit=(1,) * 4, mirrored=True))


def test_another_placement_is_refused() -> None:
    with pytest.raises(BadInput, match=r"'chimera'.*mirrored placement"):
        chimera(PipelineShape(4, 4))
