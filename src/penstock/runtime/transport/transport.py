"""The interface of transports, which move the bytes of a message from one rank to another."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from penstock.runtime.transport.messages import Message
from penstock.schedule.action import Action

__all__ = ["Inlet", "Transport", "announced", "position_code", "position_words"]

KINDS = "FBIWR"

ANNOUNCED_AT_ONCE = 48
"""How many numbers are announced at once; a transport can carry about 60."""


class Inlet(Protocol):
    """The receiving end of one message; used when it is the next message of its sender."""

    def wait(self) -> None:
        """Wait until the message has arrived, at least its beginning.

        Raises:
            Stalled: it did not arrive in time.
            RunFailed: its sender or another rank failed.
        """
        ...

    def take(self) -> list[torch.Tensor]:
        """The parts of the message as new tensors; call `wait` before."""
        ...


class Transport(Protocol):
    """Sends messages reliably; the messages from one rank to another arrive in order.

    Both ends know every message beforehand, so messages contain no shapes.
    """

    def begin(self, planned: Sequence[Message]) -> None:
        """Prepare for an iteration, in which this rank will send and receive ``planned``.

        They are in the planned order (`penstock.schedule.message_order`).
        """
        ...

    def proceed(self, planned: Sequence[Message]) -> None:
        """Expect more messages, after those that were announced."""
        ...

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
