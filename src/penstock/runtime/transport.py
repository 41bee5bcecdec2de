"""The seam below the channels: how the bytes of a message get from one rank to another."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from penstock.runtime.messages import Message
from penstock.schedule.action import Action

__all__ = ["Inlet", "Transport", "position_code", "position_name"]

KINDS = "FBIWR"


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

    def exchange(self, values: list[float], what: str) -> list[list[float]]:
        """A few numbers of every rank, by rank, on every rank."""
        ...

    def abort(self) -> None:
        """Tear the connection down so that peers notice; nothing can be sent any more."""
        ...

    def close(self) -> None:
        """Leave in peace; every rank does."""
        ...


def position_code(action: Action) -> int:
    """An action as a number that is never 0.

    >>> position_name(position_code(Action("B", 3, 17)))
    'B17'
    """
    return (KINDS.index(action.kind) + 1) << 48 | action.stage << 32 | action.micro_batch


def position_name(code: int) -> str:
    """The action's kind and micro-batch, as messages name it."""
    return f"{KINDS[(code >> 48) - 1]}{code & 0xFFFFFFFF}"
