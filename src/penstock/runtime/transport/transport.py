"""Transports move the bytes of messages from one rank to another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch

from penstock.runtime.gradients.buckets import GradientBucket
from penstock.runtime.transport.messages import Message
from penstock.schedule.action import Action

TransportChoice: TypeAlias = Literal["auto", "shared-memory", "process-groups", "in-process"]
"""Transport of tensors between stages. in-process: one process holds all stages of the plan, for
experiments and under a debugger."""

KINDS = "FBIWR"

ANNOUNCED_AT_ONCE = 48
"""Number of values that are announced at once; a transport can carry about 60."""


@dataclass(frozen=True, slots=True)
class Inlet:
    """The receiving end of one message; used when it is the next message of its sender.

    ``wait`` waits until the message has arrived, at least its beginning: it raises `Stalled` if
    that takes too long, and `RunFailed` if its sender or another rank failed. ``take``, called
    after it, gives the parts of the message as new tensors.
    """

    wait: Callable[[], None]
    take: Callable[[], list[torch.Tensor]]


class Transport(Protocol):
    """Reliable transport of messages; those from one rank to another arrive in order.

    Both ends know every message beforehand, so messages contain no shapes.
    """

    def begin(self) -> None:
        """Prepare for an iteration, whose messages `proceed` announces; some need nothing."""

    def proceed(self, planned: Sequence[Message | Action]) -> None:
        """Announce that this rank will send and receive ``planned``, after what was announced.

        They are in the planned order (`penstock.schedule.message_order`), with this rank's actions.
        """

    def at(self, position: int) -> None:
        """Publish the current action of this rank, for error messages of ranks that wait for it.

        ``position`` is its `position_code`.
        """
        ...

    def position(self) -> str:
        """The current action in words; empty before the first."""
        ...

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        """A function that sends the parts of ``message``; created once, used in every iteration.

        It may wait for the receiver if much is under way to it.
        """
        ...

    def inlet(self, message: Message) -> Inlet:
        """The receiving end of ``message``; created once, used in every iteration."""
        ...

    def drain(self) -> None:
        """Wait until everything is sent, so that nothing is left for the next iteration."""
        ...

    def announce(self, values: list[float], what: str) -> Callable[[], list[list[float]]]:
        """Publish a few numbers. The returned function waits for those of all ranks, by rank.

        Every rank must call it before the next `announce`.
        """
        ...

    def share_sums(self, buckets: Sequence[GradientBucket]) -> None:
        """Sum the gradients of ``buckets`` by this transport from now on, if it can; on all ranks.

        The holders of a bucket must give it in the same order. Otherwise their groups sum it.
        """

    def abort(self) -> None:
        """Close the connections so that peers notice; nothing can be sent afterwards."""
        ...

    def close(self) -> None:
        """Close the connections without an error; all ranks do so."""
        ...


def announced(
    transport: Transport | None, values: list[float], what: str
) -> Callable[[], list[list[float]]]:
    """`Transport.announce` for any count of numbers; without a transport there is only this rank.

    Numbers over the limit are exchanged when the returned function is called.
    """
    if transport is None:
        return lambda: [values]
    first, rest = values[:ANNOUNCED_AT_ONCE], values[ANNOUNCED_AT_ONCE:]
    of_all = transport.announce(first, what)

    def whole() -> list[list[float]]:
        rows = of_all()
        more = announced(transport, rest, what)() if rest else [[] for _ in rows]
        return [[*row, *others] for row, others in zip(rows, more, strict=True)]

    return whole


def position_code(action: Action) -> int:
    """Encode an action as a number other than 0.

    >>> position_words(position_code(Action("B", 3, 17)))
    'B17 of stage 3'
    """
    return (KINDS.index(action.kind) + 1) << 48 | action.stage << 32 | action.micro_batch


def position_words(code: int) -> str:
    """The action in words; empty before the first."""
    if not code:
        return ""
    return f"{KINDS[(code >> 48) - 1]}{code & 0xFFFFFFFF} of stage {code >> 32 & 0xFFFF}"
