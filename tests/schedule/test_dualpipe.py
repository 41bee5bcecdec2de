"""DualPipe and DualPipeV: published steps, bubbles and memory, and shapes that have none."""

from itertools import pairwise

import pytest
from schedule_shapes import bubble_s, placed

from penstock.schedule.action import Action
from penstock.schedule.clock import memory_peaks_bytes
from penstock.schedule.dependencies import predecessors
from penstock.schedule.families.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.schedule import Schedule, ScheduleFunction, parse_schedule
from penstock.schedule.shape import PipelineShape, PlacementStyle, StageCost

COSTS = [StageCost(), StageCost(1.0, 1.2, 0.5), StageCost(2.0, 1.0, 1.0), StageCost(2.0, 2.0, 1.5)]


def test_four_ranks_take_the_steps_of_the_released_code() -> None:
    # Rank 1 of 4 with 10 micro-batches, five each way; its stages are 1 (near) and 2 (far).
    order = dualpipe(placed("mirrored", 4, 10)).of(1)
    steps = (
        "1F0 2F1 1F2 2F3",  # 2 F0 F1, twice; none of step 1, for the rank is an innermost one
        "1F4 2B1 2F5 1B0 1F6 2B3 2F7 1B2 1F8 2B5 2F9 1B4",  # 4, three times; none of step 3
        "2B7 1B6 2I9 1I8",  # 6, twice, the later half without weights
        "2W9 1W8",  # 8
    )
    assert str(Schedule((order,))) == f"stage 1,2 {' '.join(steps)}"
    outer = dualpipe(placed("mirrored", 4, 10)).of(3)
    assert Schedule((outer,)) == parse_schedule(
        "stage 0,3 0F1 0F3 0F5 3F0 3I0 3W0 3F2 0F7 3B2 3F4 0B1 0F9 3B4 3F6 0B3 3B6 3F8 0B5 3B8 "
        "0I7 0W7 0I9 0W9"
    )


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("groups", range(1, 7))
@pytest.mark.parametrize("more", [0, 1, 2, 7])
@pytest.mark.parametrize(
    ("function", "style"), [(dualpipe, "mirrored"), (dualpipe_v, "folded")], ids=["", "v"]
)
def test_the_bubble_is_the_published_one_where_halves_end_together(
    function: ScheduleFunction, style: PlacementStyle, groups: int, more: int, cost: StageCost
) -> None:
    ranks, micro_batches = (2 * groups, 4 * groups) if style == "mirrored" else (groups, 2 * groups)
    rounds = 1 if style == "mirrored" else 2
    micro_batches += 2 * more if style == "mirrored" else more
    shape = placed(style, ranks, micro_batches, rounds, cost)
    schedule = function(shape)
    both, whole, weights = cost.forward_s + cost.backward_s, cost.backward_s, cost.weight_backward_s
    work_s = both * micro_batches * rounds
    joint_s = joint_makespan_s(schedule, shape) - work_s
    published_s = (groups - 1) * (both + whole - 3 * weights)
    if cost.input_backward_s >= cost.forward_s:
        assert joint_s == pytest.approx(published_s)
    else:
        assert joint_s >= published_s
    # Results that are passed on at once make the same order shorter.
    assert bubble_s(schedule, shape) == pytest.approx((groups - 1) * (both - 2 * weights))
    assert memory_peaks_bytes(schedule, shape) == (2 * groups + 1,) * ranks


def joint_makespan_s(schedule: Schedule, shape: PipelineShape) -> float:
    """Seconds of an iteration where F and the B of the other chunk after it are one block."""
    blocks = [blocks_of(order) for order in map(list, schedule.orders)]
    ends: dict[Action, float] = {}
    free, reached = [0.0] * len(blocks), [0] * len(blocks)
    present = {action for order in schedule.orders for action in order}
    while any(at < len(own) for at, own in zip(reached, blocks, strict=True)):
        played = False
        for group, own in enumerate(blocks):
            while reached[group] < len(own):
                block = own[reached[group]]
                needed = {
                    before for action in block for before in predecessors(action, shape)
                } & present
                if not needed <= ends.keys():
                    break
                begin = max([free[group], *(ends[before] for before in needed)])
                free[group] = begin + sum(shape.cost(a.stage).seconds(a.kind) for a in block)
                ends.update(dict.fromkeys(block, free[group]))
                reached[group] += 1
                played = True
        assert played
    return max(free)


def blocks_of(actions: list[Action]) -> list[list[Action]]:
    """Each forward with the whole backward right after it, if that is another chunk's."""
    ends_of_pairs = {
        index + 1
        for index, (one, two) in enumerate(pairwise(actions))
        if one.kind == "F" and two.kind == "B"
    }
    blocks: list[list[Action]] = []
    for index, action in enumerate(actions):
        if index in ends_of_pairs:
            blocks[-1].append(action)
        else:
            blocks.append([action])
    return blocks


@pytest.mark.parametrize("micro_batches", [1, 3, 7])
def test_few_micro_batches_are_the_first_of_the_published_schedule(micro_batches: int) -> None:
    few, enough = placed("folded", 4, micro_batches, 2), placed("folded", 4, 8, 2)
    for order, full in zip(dualpipe_v(few).orders, dualpipe_v(enough).orders, strict=True):
        assert list(order) == [action for action in full if action.micro_batch < micro_batches]
