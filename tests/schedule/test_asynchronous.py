"""Asynchronous 1F1B: which weights a pass uses, and how many copies of them there are."""

import pytest
from schedule_shapes import every_small_shape, placed

from penstock.errors import BadInput
from penstock.schedule.clock import memory_peaks_bytes
from penstock.schedule.families.asynchronous import (
    asynchronous_depths,
    pipedream,
    pipedream_2bw,
    pipeoptim,
    prediction_leads,
    spectrain,
    spectrain_v2,
    xpipe,
)
from penstock.schedule.families.early_backward import one_f_one_b
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import ScheduleFunction
from penstock.schedule.shape import PipelineShape, StageCost

EQUAL = StageCost(1.0, 0.5, 0.5)
EVERY = [family.make for _, family in sorted(FAMILIES.items()) if not family.flushes]


def test_every_order_is_that_of_one_f_one_b() -> None:
    for shape in every_small_shape("straight"):
        for function in EVERY:
            assert function(shape).orders == one_f_one_b(shape).orders


def test_pipedream_keeps_no_more_versions_than_micro_batches_in_flight() -> None:
    limited = PipelineShape(3, 8, in_flight_limit=(2,) * 3)
    assert pipedream(limited).weights.versions == (2, 2, 1)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 12, 13])
def test_two_versions_are_enough_for_updates_of_as_many_micro_batches(
    stages: int, micro_batches: int
) -> None:
    shape = placed("straight", stages, micro_batches)
    rule = pipedream_2bw(shape).weights
    size = rule.micro_batches_per_update
    # A single stage has nothing in flight across an update.
    assert rule.versions == ((2,) * stages if stages > 1 else (1,))
    for order in pipedream_2bw(shape).orders:
        # Updates between a micro-batch's forward and its backward.
        done = [0] * micro_batches
        backwards = 0
        for action in order:
            if action.kind == "F":
                done[action.micro_batch] = backwards // size
            else:
                assert backwards // size - done[action.micro_batch] <= 1
                backwards += 1


@pytest.mark.parametrize("stages", range(1, 10))
def test_spectrain_predicts_as_far_as_published_for_equal_halves(stages: int) -> None:
    shape = placed("straight", stages, 3, cost=EQUAL)
    rule = spectrain(shape).weights
    assert rule.prediction == "momentum"
    assert rule.forward_lead == tuple(k // 2 + stages - k - 1 for k in range(stages))
    assert rule.backward_lead == tuple(k // 2 for k in range(stages))


def test_late_stages_predict_further_where_backwards_take_longer() -> None:
    four, six = placed("straight", 4, 8), placed("straight", 6, 8)
    assert [lead[3] for lead in prediction_leads(four)] == [2, 2]
    assert [lead[5] for lead in prediction_leads(six)] == [3, 3]


@pytest.mark.parametrize("factor", [1 / 3, 0.7, 1e-4])
def test_leads_do_not_depend_on_the_unit_of_time(factor: float) -> None:
    cost = StageCost(factor, factor / 2, factor / 2)
    scaled, plain = placed("straight", 7, 4, cost=cost), placed("straight", 7, 4, cost=EQUAL)
    assert prediction_leads(scaled) == prediction_leads(plain)


@pytest.mark.parametrize("stages", range(1, 8))
def test_xpipe_predicts_as_far_as_published(stages: int) -> None:
    rule = xpipe(placed("straight", stages, 2 * stages)).weights
    assert (rule.prediction, rule.micro_batches_per_update) == ("adam", stages)
    forward = [(stages + stages - k / 2 - 2) / stages for k in range(stages)]
    backward = [(stages + k // 2 - 1) / stages for k in range(stages)]
    assert rule.forward_lead == tuple(int(exact + 0.5) for exact in forward)
    assert rule.backward_lead == tuple(int(exact + 0.5) for exact in backward)


def test_memory_shortens_warm_ups_and_what_cannot_be_kept_is_refused() -> None:
    for function in EVERY:
        tight = PipelineShape(3, 8, memory_bytes=(2.0, 9.0, 9.0))
        assert memory_peaks_bytes(function(tight), tight) == (2.0, 2.0, 1.0)
        with pytest.raises(BadInput, match=r"room for 0\.5"):
            function(PipelineShape(3, 8, memory_bytes=(0.5, 9.0, 9.0)))
        with pytest.raises(BadInput, match=r"each group one stage"):
            function(placed("looped", 2, 4, rounds=2))
        with pytest.raises(BadInput, match=r"each group one stage"):
            function(placed("mirrored", 2, 4))


@pytest.mark.parametrize("stages", range(1, 8))
@pytest.mark.parametrize("function", [spectrain_v2, pipeoptim])
def test_one_prediction_reaches_to_the_stages_own_backward(
    function: ScheduleFunction, stages: int
) -> None:
    rule = function(placed("straight", stages, 3)).weights
    assert rule.forward_lead == tuple(stages - k - 1 for k in range(stages))
    assert not any(rule.backward_lead)


def test_asynchronous_order_does_not_wait_for_the_end_of_a_batch() -> None:
    shape = placed("straight", 4, 1)
    assert asynchronous_depths(shape, pipedream(shape).weights) == (4, 3, 2, 1)
    # Two versions are only enough where no stage has more in flight than an update takes.
    assert asynchronous_depths(shape, pipedream_2bw(shape).weights) == (1, 1, 1, 1)
    eight = placed("straight", 4, 8)
    assert asynchronous_depths(eight, pipedream_2bw(eight).weights) == (4, 3, 2, 1)
