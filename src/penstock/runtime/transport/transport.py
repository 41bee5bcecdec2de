"""The seam below the channels: how the bytes of a message get from one rank to another."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from penstock.runtime.transport.messages import Message
from penstock.schedule.action import Action

__all__ = ["Inlet", "Transport", "announced", "position_code", "position_name"]

KINDS = "FBIWR"

ANNOUNCED_AT_ONCE = 48
"""A transport carries some 60 numbers at once."""


class Inlet(Protocol):
    """Where one message arrives; used when it is the next one of its sender."""

    def wait(self) -> None:
        """Wait until the message is there (or begins to be).

        Raises:
            Stalled: it did not come in time.
            RunFailed: its sender, or another rank, failed.
        """
        ...

    def take(self) -> list[torch.Tensor]:
        """The parts of the message that was waited for, as new tensors."""
        ...


class Transport(Protocol):
    """Ordered, reliable, one direction at a time: what a rank sends a peer arrives in order.

    Both ends know every message beforehand, so none carries its shape.
    """

    def begin(self, streams: Mapping[int, Sequence[Message]]) -> None:
        """Prepare for an iteration; ``streams[peer]`` will arrive from ``peer``, in this order."""
        ...

    def proceed(self, streams: Mapping[int, Sequence[Message]]) -> None:
        """More will arrive, behind what has been announced and not been taken yet."""
        ...

    def at(self, position: int) -> None:
        """Note which action this rank is at, for the messages of those who wait for it.

        ``position`` is its `position_code`.
        """
        ...

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        """What sends the parts of ``message``: returns at once, never waits for the receiver.

        Made once and called in every iteration.
        """
        ...

    def inlet(self, message: Message) -> Inlet:
        """What waits for ``message`` and takes it; made once, used in every iteration."""
        ...

    def drain(self) -> None:
        """Wait until everything sent is on its way, so that nothing is left for the next time."""
        ...

    def announce(self, values: list[float], what: str) -> Callable[[], list[list[float]]]:
        """Give a few numbers of this rank; what is returned waits for those of all, by rank.

        Every rank calls it before it announces more.
        """
        ...

    def abort(self) -> None:
        """Tear the connection down so that peers notice; nothing can be sent any more."""
        ...

    def close(self) -> None:
        """Leave in peace; every rank does."""
        ...


def announced(
    transport: Transport | None, values: list[float], what: str
) -> Callable[[], list[list[float]]]:
    """`Transport.announce` for any count of numbers; without a transport there is only this rank.

    Those that are too many follow when they are waited for.
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
    """An action as a number that is never 0.

    >>> position_name(position_code(Action("B", 3, 17)))
    'B17'
    """
    return (KINDS.index(action.kind) + 1) << 48 | action.stage << 32 | action.micro_batch


def position_name(code: int) -> str:
    """The action's kind and micro-batch, as messages name it."""
    return f"{KINDS[(code >> 48) - 1]}{code & 0xFFFFFFFF}"
