"""The send window: how many messages to one peer may be under way at once.

Gloo keeps a tensor until its sender has waited for it, and cannot be asked whether it has arrived.
So a rank that has a full window of messages under way to a peer waits for the oldest before it
sends the next. That bounds the memory of sent tensors, however many micro-batches a batch has. No
wait may be for ever:

    rank 0   F0 F1 F2 .. waits until rank 1 has taken F0
    rank 1   waits for a gradient of rank 0, which rank 0 computes after F2: deadlock

The window is wide enough to exclude this for the orders of all ranks, and for a mebibyte of
messages: a wait hands the core to the peer, which takes longer than to send a small message. A
receiver expects as many messages ahead, and what it expects can arrive. So a sender may be two
windows ahead before it waits, which is more micro-batches than schedules with early backwards have
under way.
"""

from collections.abc import Collection, Iterable, Sequence

from penstock.runtime.transport.messages import Message
from penstock.schedule.action import Action
from penstock.schedule.schedule import Schedule

__all__ = ["LEAST_WINDOW", "least_window", "send_window"]

LEAST_WINDOW = 4

FREE_BYTES = 2**20
"""Messages to a peer that are smaller than this together need no window."""


def least_window(stages: int) -> int:
    """The window that does not delay a schedule with early backwards on this number of stages."""
    return max(LEAST_WINDOW, stages)


def send_window(
    schedule: Schedule, stages: int, passed: Collection[tuple[Action, Action, Message]]
) -> int:
    """The window with which every rank can run ``schedule`` to its end.

    ``passed`` are all messages of the iteration, with the actions that send and need them. The
    ranks of a device group count as one, which waits for what any of them waits for. So the window
    holds for unequal replicas too, and for those that synchronise within an action.
    """
    place = {
        action: number
        for number, action in enumerate(a for order in schedule.orders for a in order)
    }
    streams: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source, target, message in passed:
        if message.sender != message.receiver:
            ends = streams.setdefault((message.sender, message.receiver), [])
            ends.append((place[source], place[target]))
    for ends in streams.values():
        ends.sort(key=lambda pair: pair[0])
    window = least_window(stages)
    longest = max(map(len, streams.values()), default=0)
    lengths = [len(order) for order in schedule.orders]
    while window < longest and not completes(lengths, streams.values(), window):
        window *= 2
    largest = max((message.bytes for *_, message in passed), default=0)
    return max(window, FREE_BYTES // max(1, largest))


def completes(
    lengths: Sequence[int], streams: Iterable[Sequence[tuple[int, int]]], window: int
) -> bool:
    """Whether the orders run to their end with this window.

    Actions are numbered through the orders, which have ``lengths``. A stream lists the actions that
    send its messages, in this order, and those that need them. Action ``a`` is two events: ``2 a``,
    when it has received, and ``2 a + 1``, when it has sent. They can all happen unless some are
    each other's condition.
    """
    total = 2 * sum(lengths)
    conditions, after = [0] * total, [list[int]() for _ in range(total)]

    def add(first: int, then: int) -> None:
        after[first].append(then)
        conditions[then] += 1

    start = 0
    for length in lengths:
        for event in range(2 * start, 2 * (start + length) - 1):
            add(event, event + 1)
        start += length
    for stream in streams:
        # Messages are taken in the order of the stream: with a later one, at the latest.
        taken = [0] * len(stream)
        earliest = total
        for number in range(len(stream) - 1, -1, -1):
            earliest = min(earliest, stream[number][1])
            taken[number] = earliest
        for number, (source, target) in enumerate(stream):
            add(2 * source + 1, 2 * target)
            if number >= window:
                add(2 * taken[number - window], 2 * source + 1)
    ready = [event for event in range(total) if not conditions[event]]
    for event in ready:
        for then in after[event]:
            conditions[then] -= 1
            if not conditions[then]:
                ready.append(then)
    return len(ready) == total
