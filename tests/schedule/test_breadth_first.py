"""Breadth-first order: every micro-batch passes a chunk before the next chunk begins."""

from itertools import groupby

import pytest
from schedule_shapes import bubble_s, every_small_shape, most_held, placed

from penstock.errors import BadInput
from penstock.schedule.families.early_backward import gpipe
from penstock.schedule.families.interleaved import breadth_first
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.schedule.validate import validate


def test_every_small_pipeline_can_be_played() -> None:
    for shape in every_small_shape("looped", rounds=(1, 2, 3, 4)):
        validate(breadth_first(shape), shape)


def test_a_group_begins_each_chunk_once_forward_and_once_back() -> None:
    shape = placed("looped", 3, 7, rounds=3)
    for group, order in enumerate(breadth_first(shape).orders):
        runs = [key for key, _ in groupby(order, key=lambda action: (action.kind, action.stage))]
        chunks = [group, group + 3, group + 6]
        assert runs == [("F", s) for s in chunks] + [("B", s) for s in reversed(chunks)]


@pytest.mark.parametrize("cost", [StageCost(), StageCost(2.0, 0.5, 0.25)])
@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_the_bubble_is_that_of_interleaved(
    groups: int, chunks: int, more: int, cost: StageCost
) -> None:
    shape = placed("looped", groups, groups + more, chunks, cost)
    schedule = breadth_first(shape)
    bubble = (groups - 1) * (cost.forward_s + cost.backward_s)
    assert bubble_s(schedule, shape) == pytest.approx(bubble)
    assert most_held(schedule, shape) == groups + more


def test_one_chunk_a_group_is_gpipe() -> None:
    shape = placed("looped", 3, 5)
    assert breadth_first(shape) == gpipe(shape)


def test_a_limit_below_the_micro_batches_is_refused() -> None:
    shape = PipelineShape(
        4, 3, placed("looped", 2, 3, rounds=2).placement, in_flight_limit=(3, 3, 2, 3)
    )
    with pytest.raises(BadInput, match=r"holds 3 on stage 2, whose in-flight limit is 2"):
        breadth_first(shape)


def test_another_placement_is_refused() -> None:
    with pytest.raises(BadInput, match=r"'breadth-first'.*looped placement"):
        breadth_first(placed("folded", 2, 4, rounds=2))
