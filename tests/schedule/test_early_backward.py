"""GPipe and 1F1B: the exact orders, and what memory limits do to them."""

import pytest

from penstock.errors import BadInput
from penstock.schedule.families.early_backward import early_backward, gpipe, one_f_one_b
from penstock.schedule.schedule import parse_schedule
from penstock.schedule.shape import PipelineShape
from penstock.schedule.validate import in_flight_peaks, validate


def test_a_deeper_warm_up_is_the_second_policy_of_the_paper() -> None:
    shape = PipelineShape(stages=3, micro_batches=5)
    order = early_backward(shape, lambda from_here, micro_batches: 2 * from_here - 1)
    assert order == parse_schedule("""
        stage 0   F0 F1 F2 F3 F4 B0 B1 B2 B3 B4
        stage 1   F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
        stage 2   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
    """)


def test_recomputes_stand_before_every_backward_but_one_right_after_its_forward() -> None:
    shape = PipelineShape(stages=2, micro_batches=3, recompute=(True, True))
    assert one_f_one_b(shape) == parse_schedule("""
        stage 0   F0 F1 R0 B0 F2 R1 B1 R2 B2
        stage 1   F0 B0 F1 B1 F2 B2
    """)
    assert gpipe(shape) == parse_schedule("""
        stage 0   F0 F1 F2 R0 B0 R1 B1 R2 B2
        stage 1   F0 F1 F2 R0 B0 R1 B1 R2 B2
    """)


def test_a_tighter_limit_is_carried_downstream() -> None:
    shape = PipelineShape(stages=3, micro_batches=4, in_flight_limit=(1, 3, 3))
    order = one_f_one_b(shape)
    validate(order, shape)
    assert in_flight_peaks(order, shape) == (1, 1, 1)


def test_the_family_refuses_two_stages_on_one_group() -> None:
    with pytest.raises(BadInput, match="each group one stage"):
        one_f_one_b(PipelineShape(stages=2, micro_batches=2, placement=(0, 0)))


def test_stages_are_ordered_by_the_group_that_holds_them() -> None:
    shape = PipelineShape(stages=2, micro_batches=1, placement=(1, 0))
    order = one_f_one_b(shape)
    validate(order, shape)
    assert [action.stage for action in order.of(0)] == [1, 1]
