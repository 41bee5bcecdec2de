"""BaPipe's four schedules: the closed forms of its table, as far as they are about the order."""

import pytest
from reproduction.balanced_stages import play_balanced
from schedule_shapes import placed

from penstock.errors import BadInput
from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.families.bapipe_orders import fbp_as
from penstock.schedule.families.early_backward import deep_early_backward, one_f_one_b
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.schedule.validate import in_flight_peaks

MAKES = {name: FAMILIES[name].make for name in ("1f1b-as", "1f1b-sno", "1f1b-so", "fbp-as")}


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 8, 30])
def test_stages_hold_the_published_numbers_and_take_the_same_time_without_transfers(
    stages: int, micro_batches: int
) -> None:
    shape = placed("straight", stages, micro_batches)
    to_the_end = [stages - stage for stage in range(stages)]
    for name, most in (
        ("1f1b-as", to_the_end),
        ("1f1b-sno", to_the_end),
        ("1f1b-so", [2 * left - 1 for left in to_the_end]),
        ("fbp-as", [2 * left for left in to_the_end]),
    ):
        schedule = MAKES[name](shape)
        held = tuple(min(number, micro_batches) for number in most)
        assert in_flight_peaks(schedule, shape) == held
        assert makespan_s(schedule, shape) == pytest.approx((micro_batches + stages - 1) * 3)
        assert schedule.concurrent == (name == "fbp-as")


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_side_by_side_the_clock_is_the_simulator_where_messages_take_no_time(stages: int) -> None:
    for forward_s, backward_s in ((1.0, 0.6), (1.0, 3.0), (0.7, 1.1)):
        cost = StageCost(forward_s, backward_s / 2, backward_s / 2)
        shape = placed("straight", stages, 13, cost=cost)
        costs = {"forward_s": forward_s, "backward_s": backward_s}
        played_s = play_balanced("fbp-as", stages, 13, **costs).iteration_s
        assert makespan_s(fbp_as(shape), shape) == pytest.approx(played_s)


@pytest.mark.parametrize("transfer_s", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("stages", [2, 4])
def test_overlapped_transfers_cost_their_way_there_and_back(stages: int, transfer_s: float) -> None:
    shape = placed("straight", stages, 32, cost=StageCost(transfer_s=transfer_s))
    published = (32 + stages - 1) * 3.0 + 2 * (stages - 1) * transfer_s
    assert makespan_s(MAKES["1f1b-so"](shape), shape) == pytest.approx(published)
    assert makespan_s(MAKES["1f1b-as"](shape), shape) > published


def test_they_are_the_orders_of_dapple() -> None:
    shape = placed("straight", 4, 9)
    assert MAKES["1f1b-as"](shape) == MAKES["1f1b-sno"](shape) == one_f_one_b(shape)
    assert MAKES["1f1b-so"](shape) == deep_early_backward(shape)


def test_limits_shorten_warm_ups_but_cannot_hold_back_concurrent_forwards() -> None:
    shape = PipelineShape(3, 8, in_flight_limit=(4, 4, 4))
    assert in_flight_peaks(MAKES["1f1b-so"](shape), shape) == (4, 3, 1)
    with pytest.raises(BadInput, match=r"'fbp-as'.*holds 6 on stage 0.*limit is 4"):
        fbp_as(shape)
    tight = PipelineShape(3, 8, memory_bytes=(2.0, 9.0, 9.0))
    for name, make in MAKES.items():
        if name != "fbp-as":
            assert memory_peaks_bytes(make(tight), tight) == (2.0, 2.0, 1.0)
        with pytest.raises(BadInput, match=r"room for 0\.5"):
            make(PipelineShape(3, 8, memory_bytes=(0.5, 9.0, 9.0)))
