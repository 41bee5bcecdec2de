"""A process group of two ranks on two hosts, over a channel whose times are known exactly.

Nothing is sent. Each call moves a clock by what a message of its size takes, so all that is
measured can be checked against the figures of the channel.
"""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import torch


@dataclass
class KnownChannel:
    """Stands in for ``torch.distributed`` and for ``time`` on rank 0.

    One message takes ``latency_s + bytes / bytes_per_s`` seconds, and each of its ends computes for
    ``message_s + bytes / message_bytes_per_s`` seconds of them. With ``half_duplex`` messages of
    both directions take turns.
    """

    latency_s: float
    bytes_per_s: float
    message_s: float
    message_bytes_per_s: float
    half_duplex: bool = False
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
        """There are two ranks."""
        return 2

    def barrier(self) -> None:
        """Both ranks are here at once."""

    def all_gather(self, rows: list[torch.Tensor], sent: torch.Tensor) -> None:
        """The other rank tells the same of itself, but for the name of its host."""
        rows[0].copy_(sent)
        other = {**json.loads(bytes(sent.tolist())), "host": "other"}
        text = json.dumps(other).encode().ljust(len(sent))
        rows[1].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def all_reduce(self, figures: torch.Tensor) -> None:
        """The other rank adds zeros."""

    def one_way_s(self, message: torch.Tensor) -> float:
        """Seconds of a message."""
        return self.latency_s + message.numel() / self.bytes_per_s

    def pass_on(self, message: torch.Tensor, peer: int) -> None:
        """A message goes to the other rank, or comes from it."""
        assert peer == 1
        self.now_s += self.one_way_s(message)
        self.worked_s += self.message_s + message.numel() / self.message_bytes_per_s

    send = recv = pass_on

    def begin(self, message: torch.Tensor, peer: int) -> SimpleNamespace:
        """A message in one direction begins; both have ended when both were waited for."""
        assert peer == 1
        if self.half_duplex:
            self.exchanging_s += self.one_way_s(message)
        else:
            self.exchanging_s = self.one_way_s(message)

        def wait() -> None:
            self.now_s += self.exchanging_s
            self.exchanging_s = 0.0

        return SimpleNamespace(wait=wait)

    isend = irecv = begin
