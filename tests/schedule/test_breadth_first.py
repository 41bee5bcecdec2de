"""Breadth-first order: every micro-batch passes a chunk before the next chunk begins."""

from itertools import groupby

import pytest
from schedule_shapes import placed

from penstock.errors import BadInput
from penstock.schedule.families.early_backward import gpipe
from penstock.schedule.families.interleaved import breadth_first
from penstock.schedule.shape import PipelineShape


def test_a_group_begins_each_chunk_once_forward_and_once_back() -> None:
    shape = placed("looped", 3, 7, rounds=3)
    for group, order in enumerate(breadth_first(shape).orders):
        runs = [key for key, _ in groupby(order, key=lambda action: (action.kind, action.stage))]
        chunks = [group, group + 3, group + 6]
        assert runs == [("F", s) for s in chunks] + [("B", s) for s in reversed(chunks)]


def test_one_chunk_a_group_is_gpipe() -> None:
    shape = placed("looped", 3, 5)
    assert breadth_first(shape) == gpipe(shape)


def test_a_limit_below_the_micro_batches_is_refused() -> None:
    shape = PipelineShape(
        4, 3, placed("looped", 2, 3, rounds=2).placement, in_flight_limit=(3, 3, 2, 3)
    )
    with pytest.raises(BadInput, match=r"holds 3 on stage 2, whose in-flight limit is 2"):
        breadth_first(shape)
