"""Hanayo: bubbles and memory of its waves against the published ones, for any number of rounds."""

import pytest
from schedule_shapes import bubble_s, most_held, placed

from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.families.hanayo import hanayo
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.schedule.validate import validate

COSTS = [StageCost(1.0, 1.0, 1.0), StageCost(1.0, 0.5, 0.5), StageCost(2.0, 0.5, 0.25)]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_the_bubble_shrinks_with_the_waves(groups: int, waves: int, cost: StageCost) -> None:
    bubble = (groups - 1) * 2 * waves * max(cost.forward_s, cost.backward_s) / waves
    for micro_batches in range(groups, 4 * groups + 2):
        shape = placed("folded", groups, micro_batches, 2 * waves, cost)
        schedule = hanayo(shape)
        assert bubble_s(schedule, shape) == pytest.approx(bubble)
        if micro_batches % groups == 0:
            assert most_held(schedule, shape) == groups


@pytest.mark.parametrize("groups", [2, 3, 4, 6])
@pytest.mark.parametrize("rounds", [3, 5])
def test_a_wave_of_three_rounds_idles_less_than_one_f_one_b(groups: int, rounds: int) -> None:
    shape = placed("folded", groups, 4 * groups, rounds)
    assert bubble_s(hanayo(shape), shape) < (groups - 1) * rounds * 3.0


def test_blocks_of_more_micro_batches_than_groups_give_way_to_limits() -> None:
    loose = placed("folded", 4, 7, rounds=4)
    tight = PipelineShape(16, 7, loose.placement, costs=loose.costs, memory_bytes=(16.0,) * 4)
    schedule = hanayo(tight)
    validate(schedule, tight)
    assert max(memory_peaks_bytes(hanayo(loose), loose)) > 16
    assert makespan_s(hanayo(loose), loose) < makespan_s(schedule, tight)
