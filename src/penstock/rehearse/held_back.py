"""A rank's messages and sums, which arrive and end no sooner than on the emulated links.

The real transport and the real sums carry the tensors. What is added is only a wait: a message is
taken, and a sum is complete, when the emulated links say so.
"""

import json
import select
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import inf

import torch

from penstock.errors import RunFailed, Stalled
from penstock.rehearse.emulated_stage import Lateness, wait_until
from penstock.runtime.gradients.bucket import GradientSum
from penstock.runtime.transport.messages import Message
from penstock.runtime.transport.transport import Inlet, Transport

__all__ = ["HeldBackSum", "HeldBackTransport", "LinkClient"]

MOST_AT_ONCE = 1 << 16
"""Bytes that are read from the server at once."""


class LinkClient:
    """This rank's connection to the `LinkServer`.

    ``limit_s`` is how long an answer may take. ``arrivals`` are the moments at which messages of
    each rank were here, and ``sum_ends`` those at which each sum was, before they were held back.
    """

    def __init__(self, name: str, rank: int, limit_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(f"\0{name}")
        self._limit_s, self._unread = limit_s, b""
        self._messages: dict[int, deque[float]] = {}
        self._sums: dict[str, deque[float]] = {}
        self.arrivals: defaultdict[int, list[float]] = defaultdict(list)
        self.sum_ends: defaultdict[str, list[float]] = defaultdict(list)
        self._works, self._computed_s = 0, inf
        self._say(["rank", rank])

    def message(self, message: Message, size_bytes: float, tensors: int) -> None:
        """A message is ready to be sent."""
        ends = message.sender, message.receiver
        label = message.sender_stage, message.receiver_stage, message.micro_batch
        self._say(["message", *ends, size_bytes, tensors, label, time.perf_counter()])

    def sum(self, key: str, members: Sequence[int], size_bytes: float, stage: int) -> None:
        """This rank's gradients of a bucket are complete."""
        self._say(["sum", key, members, size_bytes, stage, time.perf_counter()])

    def end_of_message(self, source: int) -> float:
        """When the next message of ``source`` has arrived."""
        return self._next(self._messages, source, f"a message of rank {source}")

    def end_of_sum(self, key: str) -> float:
        """When the sum ``key`` is complete."""
        return self._next(self._sums, key, f"the sum {key}")

    def compute(self, begin_s: float, seconds: float, lateness: Lateness) -> float:
        """Wait until this rank has computed on cores that it shares; returns when that was."""
        self._works, self._computed_s = self._works + 1, inf
        self._say(["compute", self._works, seconds, begin_s])
        while (left_s := self._computed_s - time.perf_counter()) > 0:
            answered = self._receive(min(left_s, self._limit_s))
            if not answered and self._computed_s == inf:
                raise Stalled("the rehearsal's shared cores did not answer in time")
        lateness.add(time.perf_counter() - self._computed_s)
        return self._computed_s

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def _say(self, words: list[object]) -> None:
        try:
            self._socket.sendall(json.dumps(words).encode() + b"\n")
        except OSError as cause:
            raise RunFailed("the rehearsal's links have ended before this rank") from cause

    def _next(self, ends: dict, wanted: int | str, what: str) -> float:  # type: ignore[type-arg]
        while not (known := ends.get(wanted)):
            if not self._receive(self._limit_s):
                raise Stalled(f"{what} did not begin on the emulated links in time")
        return known.popleft()

    def _receive(self, within_s: float) -> bool:
        """Take in what the server says, if it says something within these seconds."""
        if not select.select([self._socket], [], [], within_s)[0]:
            return False
        data = self._socket.recv(MOST_AT_ONCE)
        if not data:
            raise RunFailed("the rehearsal's links have ended before this rank")
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            match json.loads(line):
                case ["message", source, end_s]:
                    self._messages.setdefault(source, deque()).append(end_s)
                case ["sum", key, end_s]:
                    self._sums.setdefault(key, deque()).append(end_s)
                case ["compute", number, end_s] if number == self._works:
                    self._computed_s = end_s
                case _:
                    pass
        return True


class HeldBackInlet:
    """The receiving end of a message; see `Inlet`."""

    def __init__(self, inlet: Inlet, source: int, client: LinkClient, lateness: Lateness) -> None:
        self._inlet, self._source, self._client = inlet, source, client
        self._lateness = lateness

    def wait(self) -> None:
        """Wait until the message is here, and would be on the emulated links."""
        self._inlet.wait()
        self._client.arrivals[self._source].append(time.perf_counter())
        wait_until(self._client.end_of_message(self._source), self._lateness)

    def take(self) -> list[torch.Tensor]:
        """The parts of the message."""
        return self._inlet.take()


class HeldBackTransport:
    """A real transport whose messages are held back; see `Transport`.

    ``size_of`` gives a message's planned bytes and its number of tensors.
    """

    def __init__(
        self,
        transport: Transport,
        client: LinkClient,
        size_of: Callable[[Message], tuple[float, int]],
        lateness: Lateness,
    ) -> None:
        self._transport, self._client, self._lateness = transport, client, lateness
        self._size_of = size_of
        self.keeps_sent = transport.keeps_sent
        self.begin, self.proceed = transport.begin, transport.proceed
        self.at, self.drain, self.announce = transport.at, transport.drain, transport.announce
        self.abort, self.close = transport.abort, transport.close

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        """A function that sends the parts of ``message`` and says so."""
        send, client = self._transport.outlet(message), self._client
        size_bytes, tensors = self._size_of(message)

        def outgoing(parts: Sequence[torch.Tensor]) -> None:
            client.message(message, size_bytes, tensors)
            send(parts)

        return outgoing

    def inlet(self, message: Message) -> Inlet:
        """The receiving end of ``message``."""
        inlet = self._transport.inlet(message)
        return HeldBackInlet(inlet, message.sender, self._client, self._lateness)


class HeldBackSum:
    """The real sum of a bucket, which ends no sooner than on the emulated links."""

    def __init__(
        self,
        real: GradientSum,
        client: LinkClient,
        key: str,
        holders: Sequence[int],
        size_bytes: float,
        stage: int,
        lateness: Lateness,
    ) -> None:
        self._real, self._client, self._key, self._lateness = real, client, key, lateness
        self._told = (key, list(holders), size_bytes, stage)

    def start(self) -> None:
        """This rank's gradients are complete."""
        self._client.sum(*self._told)
        self._real.start()

    def wait(self) -> None:
        """Wait until the bucket holds the sum, and would on the emulated links."""
        self._real.wait()
        self._client.sum_ends[self._key].append(time.perf_counter())
        wait_until(self._client.end_of_sum(self._key), self._lateness)

    def settle(self) -> None:
        """Wait until no other holder reads this rank's gradients."""
        self._real.settle()

    def close(self) -> None:
        """Stop sharing the bucket's memory."""
        self._real.close()
