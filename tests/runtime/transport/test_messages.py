"""Messages follow from plan, schedule and boundary tensors, equally at both ends."""

import pytest
import torch

from penstock.capture.contract import TensorSpec
from penstock.plan.plan import Plan, Stage
from penstock.runtime.micro_batches import cut_batch, forward_schedule, runnable_schedule
from penstock.runtime.transport.messages import (
    BoundaryTensors,
    Message,
    messages_across,
    messages_between_actions,
    messages_of_rank,
)
from penstock.schedule.action import Action

HIDDEN = TensorSpec("hidden", (8, 5), torch.float32, 0, requires_grad=True)
MASK = TensorSpec("mask", (3, 3), torch.bool, -1)


def three_to_two() -> tuple[Plan, list[BoundaryTensors]]:
    stages = (
        Stage(range(1), (0, 1, 2), (3, 3, 2)),
        Stage(range(1, 2), (3, 4), (4, 4)),
    )
    return Plan(stages, 2, 8, "1f1b"), [BoundaryTensors(0, 1, (HIDDEN, MASK))]


def messages(rank: int, rows: int = 16):
    plan, boundaries = three_to_two()
    cut = cut_batch(plan, rows)
    schedule, shape = runnable_schedule(plan, len(cut.micro_batches))
    passed = messages_between_actions(plan, boundaries, schedule, cut)
    return messages_of_rank(rank, schedule, shape, passed)


def test_rows_are_sent_to_exactly_those_who_need_them() -> None:
    sent = {
        (m.sender, m.receiver): [(p.spec.name, p.source_rows, p.target_rows) for p in m.parts]
        for rank in (0, 1, 2)
        for m in messages(rank).outgoing[Action("F", 0, 0)]
    }
    nothing = range(0)
    assert sent == {
        (0, 3): [("hidden", range(3), range(3)), ("mask", nothing, nothing)],
        (1, 3): [("hidden", range(1), range(3, 4))],
        (1, 4): [("hidden", range(1, 3), range(2)), ("mask", nothing, nothing)],
        (2, 4): [("hidden", range(2), range(2, 4))],
    }


def test_gradients_go_back_the_way_the_tensors_came_and_masks_have_none() -> None:
    (message,) = (m for m in messages(4).outgoing[Action("B", 1, 0)] if m.receiver == 2)
    (part,) = message.parts
    assert (part.spec.name, part.source_rows, part.target_rows) == ("hidden", range(2, 4), range(2))
    assert part.fills_target


@pytest.mark.parametrize("rows", [16, 7, 1])
def test_what_is_sent_is_what_is_received_in_the_same_order(rows: int) -> None:
    by_rank = {rank: messages(rank, rows) for rank in range(5)}
    for receiver, own in by_rank.items():
        arriving = [m for m in own.planned if isinstance(m, Message) and m.receiver == receiver]
        for sender in {m.sender for m in arriving}:
            stream = [m for m in arriving if m.sender == sender]
            sent = [
                m
                for sent in by_rank[sender].outgoing.values()
                for m in sent
                if m.receiver == receiver
            ]
            assert sorted(map(str, sent)) == sorted(map(str, stream))
            assert sum(m.bytes for m in sent) == sum(m.bytes for m in stream)
            numbers = [m.micro_batch for m in stream]
            assert numbers == sorted(numbers)


def test_a_replica_without_rows_takes_no_part() -> None:
    assert not messages(2, rows=1).outgoing and not messages(2, rows=1).incoming


def test_an_evaluation_sends_no_gradients() -> None:
    plan, boundaries = three_to_two()
    shape = plan.shape()
    cut = cut_batch(plan, 16)
    schedule = forward_schedule(shape)
    passed = messages_between_actions(plan, boundaries, schedule, cut)
    own = messages_of_rank(3, schedule, shape, passed)
    assert not own.outgoing and own.incoming


def test_nothing_leaves_a_device_for_a_stage_that_shares_its_home() -> None:
    """Also in a batch of which one replica has no rows, for tensors with samples and without."""
    homes = [Stage(range(s, s + 1), (0, 1, 2), (1, 2, 2)) for s in range(2)]
    plan, boundary = Plan(tuple(homes), 1, 5, "1f1b"), BoundaryTensors(0, 1, (HIDDEN, MASK))
    for rows in (5, 2):
        cut = cut_batch(plan, rows)
        passed = list(messages_across(boundary, plan, cut, 0))
        assert [message.sender for message in passed] == [message.receiver for message in passed]
        own = {message.sender for message in passed}
        assert own == {replica for replica, count in enumerate(cut.slices[0][0]) if count}
    assert cut.slices[0][0] == (0, 1, 1)
