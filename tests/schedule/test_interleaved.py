"""Interleaved 1F1B: its published bubble, any number of micro-batches, and PyTorch's orders."""

import pytest
from schedule_shapes import bubble_s, most_held, placed

from penstock.schedule.action import parse_action
from penstock.schedule.clock import makespan_s, memory_peaks_bytes
from penstock.schedule.families.interleaved import interleaved
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.shape import PipelineShape, StageCost
from penstock.schedule.validate import validate

COSTS = [StageCost(1.0, 1.0, 1.0), StageCost(1.0, 0.5, 0.5), StageCost(2.0, 0.5, 0.25)]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_the_bubble_is_the_published_one(groups: int, chunks: int, cost: StageCost) -> None:
    bubble = (groups - 1) * (cost.forward_s + cost.backward_s)
    # Published for multiples of the groups; here for whatever fills them.
    for micro_batches in range(groups, 4 * groups + 2):
        shape = placed("looped", groups, micro_batches, chunks, cost)
        assert bubble_s(interleaved(shape), shape) == pytest.approx(bubble)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("groups", [2, 5, 8])
def test_fewer_micro_batches_than_groups_take_as_long_as_one_after_the_other_must(
    groups: int, cost: StageCost
) -> None:
    for micro_batches in range(1, groups):
        shape = placed("looped", groups, micro_batches, 3, cost)
        passes = shape.stages + micro_batches - 1
        shortest_s = passes * (cost.forward_s + cost.backward_s)
        assert makespan_s(interleaved(shape), shape) == pytest.approx(shortest_s)


@pytest.mark.parametrize("groups", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_the_first_group_holds_the_published_number(groups: int, chunks: int) -> None:
    shape = placed("looped", groups, 4 * groups, chunks)
    assert most_held(interleaved(shape), shape) == pytest.approx(groups + (groups - 1) / chunks)


@pytest.mark.parametrize("transfer_s", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_it_is_nowhere_longer_nor_fuller_than_pytorchs(
    groups: int, chunks: int, transfer_s: float
) -> None:
    compared = 0
    for cost in (StageCost(transfer_s=transfer_s), StageCost(2.0, 0.5, 0.25, transfer_s)):
        for micro_batches in range(1, 25):
            shape = placed("looped", groups, micro_batches, chunks, cost)
            theirs = pytorch_interleaved(shape)
            if theirs is None:
                continue
            compared += 1
            ours = interleaved(shape)
            assert makespan_s(ours, shape) <= makespan_s(theirs, shape) + 1e-9
            held = zip(
                memory_peaks_bytes(ours, shape), memory_peaks_bytes(theirs, shape), strict=True
            )
            assert all(mine <= other for mine, other in held)
    assert compared >= 16


def pytorch_interleaved(shape: PipelineShape) -> Schedule | None:
    """PyTorch's order for the same pipeline; None where it asks for other micro-batches."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rounds = max(1, shape.micro_batches // shape.groups)
    if shape.micro_batches % rounds:
        return None
    # The order needs a few numbers only; a whole schedule object needs processes.
    made = object.__new__(schedules.ScheduleInterleaved1F1B)
    made.pp_group_size = shape.groups
    made.n_local_stages = shape.stages // shape.groups
    made._n_microbatches = shape.micro_batches
    made.number_of_rounds = rounds
    made.microbatches_per_round = shape.micro_batches // rounds
    orders = [made._calculate_single_rank_operations(rank) for rank in range(shape.groups)]
    return schedule_from_actions(
        [parse_action(str(action)) for action in order if action is not None] for order in orders
    )


def test_tighter_limits_shorten_the_warm_up_and_keep_the_bubble() -> None:
    loose = placed("looped", 4, 8, rounds=2)
    tight = PipelineShape(8, 8, loose.placement, costs=loose.costs, memory_bytes=(8.0,) * 4)
    assert max(memory_peaks_bytes(interleaved(loose), loose)) == 11
    schedule = interleaved(tight)
    validate(schedule, tight)
    assert bubble_s(schedule, tight) == pytest.approx(bubble_s(interleaved(loose), loose))


def test_tighter_limits_give_up_even_blocks() -> None:
    loose = placed("looped", 4, 7, rounds=2)
    tight = PipelineShape(8, 7, loose.placement, costs=loose.costs, memory_bytes=(8.0,) * 4)
    schedule = interleaved(tight)
    validate(schedule, tight)
    assert max(memory_peaks_bytes(interleaved(loose), loose)) == 14
    assert max(memory_peaks_bytes(schedule, tight)) == 8
    assert bubble_s(schedule, tight) > bubble_s(interleaved(loose), loose)
