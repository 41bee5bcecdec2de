"""The send window bounds what is under way to a peer, and never makes ranks wait for ever."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from runtime.matrix_plans import Case, representative

from penstock.capture.stage_program import TensorSpec
from penstock.plan.plan import Plan, Stage
from penstock.runtime.iteration import prepare_iteration
from penstock.runtime.micro_batches import cut_batch, forward_schedule, schedule_of
from penstock.runtime.transport.messages import (
    BoundaryTensors,
    Message,
    messages_between_actions,
    messages_of_rank,
)
from penstock.runtime.transport.send_window import FREE_BYTES, least_window, send_window
from penstock.schedule.action import Action
from penstock.schedule.registry import FAMILIES
from penstock.schedule.schedule import Schedule, schedule_from_actions

LAYERS = 13
MANY = 32

WIDE = FREE_BYTES // 16
"""A row of so many numbers is too large to be free of the window."""


def boundaries_of(stages: int, *, skips: bool = True, width: int = 3) -> list[BoundaryTensors]:
    """A tensor from each stage to the next, and a mask without a gradient to the last."""
    hidden = TensorSpec("hidden", (5, width), torch.float32, 0, requires_grad=True)
    mask = TensorSpec("mask", (5,), torch.bool, 0)
    found = [BoundaryTensors(s, s + 1, (hidden,)) for s in range(stages - 1)]
    return found + [BoundaryTensors(0, stages - 1, (mask,))] * (skips and stages > 2)


class Rank:
    """Runs its actions with sends that wait while a window is full: a reference in plain steps."""

    def __init__(self, number: int, actions: Sequence[Action], plan_of_messages: tuple) -> None:
        self.number, (self.outgoing, self.incoming, streams) = number, plan_of_messages
        self.places = {
            name_of(message): place for s in streams.values() for place, message in enumerate(s)
        }
        # How many messages each peer was sent, and how many of each peer's were taken.
        self.sent: Counter[int] = Counter()
        self.taken: Counter[int] = Counter()
        self.progress = self.steps(actions)
        self.ranks: dict[int, Rank] = {}
        self.window = 0

    def steps(self, actions: Sequence[Action]) -> Iterator[bool]:
        """Yields whether anything has happened; ends with the last action."""
        for action in actions:
            for message in self.incoming.get(action, ()):
                peer = message.sender
                # Messages are taken in the order in which they were sent.
                while peer != self.number and self.taken[peer] <= self.places[name_of(message)]:
                    while self.taken[peer] == self.ranks[peer].sent[self.number]:
                        yield False
                    self.taken[peer] += 1
            for message in self.outgoing.get(action, ()):
                peer = message.receiver
                if peer != self.number:
                    while self.sent[peer] - self.ranks[peer].taken[self.number] >= self.window:
                        yield False
                    self.sent[peer] += 1
            yield True


def name_of(message: Message) -> tuple[object, ...]:
    """What tells a message of a stream from the others."""
    return (
        message.kind,
        message.micro_batch,
        message.sender_stage,
        message.receiver_stage,
        message.sender,
    )


def runs(
    plan: Plan, schedule: Schedule, boundaries: Sequence[BoundaryTensors], window: int
) -> bool:
    """Whether every rank comes to the end of its order."""
    cut, shape = cut_batch(plan, plan.global_batch), plan.shape()
    passed = list(messages_between_actions(plan, boundaries, schedule, cut))
    ranks: dict[int, Rank] = {}
    for number in sorted(plan.devices):
        own = messages_of_rank(number, schedule, shape, passed)
        group = next(g for g, devices in enumerate(plan.device_groups) if number in devices)
        messages = own.outgoing, own.incoming, own.streams
        ranks[number] = Rank(number, schedule.of(group), messages)
    for rank in ranks.values():
        rank.ranks, rank.window = ranks, window
    left = list(ranks.values())
    while left:
        moved = False
        for rank in list(left):
            while (step := next(rank.progress, None)) is True:
                moved = True
            if step is None:
                left.remove(rank)
                moved = True
        if not moved:
            return False
    return True


def window_of(plan: Plan, schedule: Schedule, boundaries: Sequence[BoundaryTensors]) -> int:
    passed = messages_between_actions(
        plan, boundaries, schedule, cut_batch(plan, plan.global_batch)
    )
    return send_window(schedule, len(plan.stages), list(passed))


CASES = {
    # Of the cases of each schedule the one with the most ranks in unequal numbers.
    case.schedule: replace(case, micro_batches=MANY)
    for case in sorted(representative(), key=lambda c: (len(set(c.replicas)), sum(c.replicas)))
    if len(case.replicas) > 1
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].flushes])
def test_every_order_runs_to_its_end_with_its_window(name: str) -> None:
    plan = CASES[name].plan(LAYERS)
    boundaries, rows = boundaries_of(len(plan.stages), width=WIDE), plan.global_batch
    own = prepare_iteration(plan, boundaries, 0, rows, True, (), True)
    schedule, _ = schedule_of(plan, plan.micro_batches)
    assert runs(plan, schedule, boundaries, own.window)
    forwards = forward_schedule(replace(plan.shape(), recompute=()))
    bound = window_of(plan, forwards, boundaries)
    assert bound == least_window(len(plan.stages)), "an evaluation sends far ahead"
    assert runs(plan, forwards, boundaries, bound)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "gpipe", "chimera"])
def test_the_window_does_not_grow_with_the_number_of_micro_batches(name: str) -> None:
    found = set[int]()
    for micro_batches in (MANY, 2 * MANY):
        plan = replace(CASES[name], micro_batches=micro_batches).plan(LAYERS)
        schedule, _ = schedule_of(plan, plan.micro_batches)
        found.add(window_of(plan, schedule, boundaries_of(len(plan.stages), width=WIDE)))
    assert found == {least_window(len(plan.stages))}


def test_small_messages_are_bounded_by_their_bytes() -> None:
    plan = Case("gpipe", (1, 1), MANY).plan(LAYERS)
    schedule, _ = schedule_of(plan, plan.micro_batches)
    for width in (16, 4096, WIDE):
        boundaries = boundaries_of(2, width=width)
        largest = max(
            message.bytes
            for *_, message in messages_between_actions(
                plan, boundaries, schedule, cut_batch(plan, plan.global_batch)
            )
        )
        assert window_of(plan, schedule, boundaries) == max(4, FREE_BYTES // largest)


def test_where_a_narrow_window_would_deadlock_it_is_wider() -> None:
    """Rank 1 waits for rank 2, which waits for what rank 0 computes after all first forwards."""
    stages = tuple(Stage(range(s, s + 1), (d,), (1,)) for s, d in enumerate((0, 1, 0, 2, 1)))
    plan = Plan(stages, MANY, 1, "interleaved")
    numbers = range(MANY)
    first = [Action("F", stage, m) for stage in (0, 2) for m in numbers]
    second = [Action("F", stage, m) for m in numbers for stage in (1, 4)]
    third = [Action("F", 3, m) for m in numbers]
    schedule = schedule_from_actions([first, second, third])
    boundaries = boundaries_of(5, skips=False, width=WIDE)
    window, narrow = window_of(plan, schedule, boundaries), least_window(5)
    assert not runs(plan, schedule, boundaries, narrow)
    assert runs(plan, schedule, boundaries, window)
    assert narrow < window <= 2 * MANY


def test_a_transport_that_keeps_nothing_has_no_window() -> None:
    plan = Case("1f1b", (1, 1), MANY).plan(LAYERS)
    assert prepare_iteration(plan, boundaries_of(2), 0, plan.global_batch, True).window == 0
