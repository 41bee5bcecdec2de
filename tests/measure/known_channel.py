"""A process group of ranks on two hosts, over a channel whose times are known exactly.

Nothing is sent. Each call moves a clock by what a message of its size takes, so all that is
measured can be checked against the figures of the channel.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class KnownChannel:
    """Stands in for ``torch.distributed`` and for ``time`` on rank 0.

    One message takes ``latency_s + bytes / bytes_per_s`` seconds, and each of its ends computes for
    ``message_s + bytes / message_bytes_per_s`` seconds of them. With ``half_duplex`` messages of
    both directions take turns. After ``quiet_rounds`` other pairs send at the same time, and
    messages take ``crowded`` times as long.
    """

    latency_s: float
    bytes_per_s: float
    message_s: float
    message_bytes_per_s: float
    half_duplex: bool = False
    ranks_of_a_host: int = 1
    crowded: float = 1.0
    quiet_rounds: int = 1000
    backend: str = "gloo"
    now_s: float = 0.0
    worked_s: float = 0.0
    exchanging_s: float = 0.0

    def perf_counter(self) -> float:
        """Seconds that have passed."""
        return self.now_s

    def process_time(self) -> float:
        """Seconds that this rank has computed."""
        return self.worked_s

    def is_initialized(self) -> bool:
        """There is a process group."""
        return True

    def get_rank(self) -> int:
        """This is the rank that measures."""
        return 0

    def get_world_size(self) -> int:
        """There are two hosts."""
        return 2 * self.ranks_of_a_host

    def barrier(self, group: None) -> None:
        """All ranks are here at once."""
        self.quiet_rounds -= 1

    def get_backend(self, group: None) -> str:
        """What carries the messages."""
        return self.backend

    def all_gather(self, rows: list[torch.Tensor], sent: torch.Tensor, group: None) -> None:
        """The other ranks tell the same of themselves, but for the name of the other host."""
        other = {**json.loads(bytes(sent.tolist())), "host": "other"}
        text = json.dumps(other).encode().ljust(len(sent))
        for rank, row in enumerate(rows):
            here = rank < self.ranks_of_a_host
            row.copy_(sent if here else torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def all_reduce(self, figures: torch.Tensor, group: None) -> None:
        """The others add what they have measured, which is the same as this rank's."""
        for row in range(1, len(figures)):
            if not figures[row].any():
                figures[row] = figures[row - 1]

    def one_way_s(self, message: torch.Tensor) -> float:
        """Seconds of a message."""
        seconds = self.latency_s + message.numel() / self.bytes_per_s
        return seconds * (self.crowded if self.quiet_rounds < 0 else 1.0)

    def pass_on(self, message: torch.Tensor, peer: int, group: None) -> None:
        """A message goes to another rank, or comes from it."""
        assert peer
        self.now_s += self.one_way_s(message)
        self.worked_s += self.message_s + message.numel() / self.message_bytes_per_s

    send = recv = pass_on

    def begin(self, message: torch.Tensor, peer: int) -> SimpleNamespace:
        """A message in one direction begins; both have ended when both were waited for."""
        assert peer
        if self.half_duplex:
            self.exchanging_s += self.one_way_s(message)
        else:
            self.exchanging_s = self.one_way_s(message)

        def wait() -> None:
            self.now_s += self.exchanging_s
            self.exchanging_s = 0.0

        return SimpleNamespace(wait=wait)

    isend = irecv = begin

    def P2POp(
        self, begin: Callable[..., Any], message: torch.Tensor, peer: int, group: None
    ) -> Any:
        """A message of several that begin as one."""
        return begin, message, peer

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[Any]:
        """Begin all of them."""
        return [begin(message, peer) for begin, message, peer in operations]
