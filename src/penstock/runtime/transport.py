"""The seam below the channels: how the bytes of a message get from one rank to another."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from penstock.runtime.messages import Message
from penstock.schedule.action import Action

__all__ = ["Transport"]


class Transport(Protocol):
    """Ordered, reliable, one direction at a time: what a rank sends a peer arrives in order.

    Both ends know every message beforehand, so none carries its shape.
    """

    def begin(self, streams: Mapping[int, Sequence[Message]]) -> None:
        """Prepare for an iteration; ``streams[peer]`` will arrive from ``peer``, in this order."""
        ...

    def at(self, action: Action) -> None:
        """Note which action this rank is at, for the messages of those who wait for it."""
        ...

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send the parts of ``message``; returns at once, never waits for the receiver."""
        ...

    def await_message(self, message: Message) -> None:
        """Wait until ``message``, the next one of its sender, is there (or begins to be).

        Raises:
            Stalled: it did not come in time.
            RunFailed: its sender, or another rank, failed.
        """
        ...

    def take(self, message: Message) -> list[torch.Tensor]:
        """The parts of the message that was awaited, as new tensors."""
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
