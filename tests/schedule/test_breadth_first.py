"""Breadth-first order: every micro-batch passes a chunk before the next chunk begins."""

from itertools import groupby

from schedule_shapes import placed

from penstock.schedule.families.interleaved import breadth_first


def test_a_group_begins_each_chunk_once_forward_and_once_back() -> None:
    shape = placed("looped", 3, 7, rounds=3)
    for group, order in enumerate(breadth_first(shape).orders):
        runs = [key for key, _ in groupby(order, key=lambda action: (action.kind, action.stage))]
        chunks = [group, group + 3, group + 6]
        assert runs == [("F", s) for s in chunks] + [("B", s) for s in reversed(chunks)]
