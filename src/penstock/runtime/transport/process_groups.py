"""Messages by torch.distributed's point-to-point operations: Gloo, or NCCL between GPUs.

Under Gloo two process groups carry everything, one for messages to higher ranks and one for those
to lower ranks: Gloo connects each pair of ranks by a socket of its own, so that the messages of a
pair are one ordered stream, and each group has a thread of its own. So a rank has the same number
of groups in every plan. NCCL orders all operations of a communicator, also those with different
peers, so there each directed pair of ranks has a group. All ranks create all groups in the same
order.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.errors import RunFailed
from penstock.runtime.processes.failures import PeerVanished
from penstock.runtime.processes.waiting import failure_of
from penstock.runtime.processes.watch import WATCH, CurrentWait
from penstock.runtime.processes.world import World
from penstock.runtime.transport.messages import Message, MessagePart
from penstock.runtime.transport.transport import position_words

__all__ = ["GroupTransport"]

POSTED_BYTES = 64 << 20
"""Limit of receives posted ahead for each peer, in bytes; one is always posted."""

ALIGNMENT_BYTES = 16


@dataclass(slots=True)
class Posted:
    """A posted receive: its message, its buffer, and a handle to wait for it."""

    message: Message
    buffer: torch.Tensor
    work: dist.Work | None


class Sent(NamedTuple):
    """A message under way: its buffer, and a handle to wait for it."""

    message: Message
    buffer: torch.Tensor
    work: dist.Work | None


class GroupTransport:
    """Point-to-point operations of one rank; see `Transport`."""

    def __init__(self, world: World, pairs: Sequence[tuple[int, int]]) -> None:
        self._world = world
        # Gloo's handle of a send is complete only when it has been waited for.
        self.keeps_sent = world.backend == "gloo"
        self._groups = groups_of_pairs(world, pairs)
        self._sums = world.new_group(range(world.size), "gloo")
        self._waiting: dict[int, deque[Message]] = {}
        self._posted: dict[int, deque[Posted]] = {}
        self._sending: dict[int, deque[Sent]] = {}
        self._window = 0
        self._actions = 1
        self._position = 0
        WATCH.action = self.position

    def begin(self, streams: Mapping[int, Sequence[Message]], window: int = 0) -> None:
        """Post the first receives of every stream."""
        self._actions, self._window = 1, window
        for peer, messages in streams.items():
            self._waiting[peer] = deque(messages)
            self._posted[peer] = deque()
            self._post(peer)

    def proceed(self, streams: Mapping[int, Sequence[Message]], window: int = 0) -> None:
        """Post more receives, after those that remain."""
        self._window = window
        for peer, messages in streams.items():
            self._waiting.setdefault(peer, deque()).extend(messages)
            self._posted.setdefault(peer, deque())
            self._post(peer)

    def at(self, position: int) -> None:
        """Count the actions: the time limit of `announce` is proportional to their number."""
        self._actions += 1
        self._position = position

    def position(self) -> str:
        """The current action in words."""
        return position_words(self._position)

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        """A function that sends ``message``."""
        sending = self._sending.setdefault(message.receiver, deque())
        return partial(self._send, message, sending)

    def inlet(self, message: Message) -> "GroupInlet":
        """The receiving end of ``message``."""
        return GroupInlet(self, message)

    def _send(
        self, message: Message, sending: deque[Sent], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Start sending; the buffer is kept until the operation is complete."""
        if self.keeps_sent:
            while len(sending) >= self._window > 0:
                self._settle(sending.popleft())
        else:
            while sending and sending[0].work and sending[0].work.is_completed():
                sending.popleft()
        buffer = packed(message, tensors)
        group = self._groups[message.sender, message.receiver]
        try:
            work = dist.isend(buffer, message.receiver, group=group)
        except RuntimeError as cause:
            raise self._failure(cause, str(message), message.receiver) from cause
        sending.append(Sent(message, buffer, work))

    def _settle(self, sent: Sent) -> None:
        """Wait until a message has been received, or has at least left this rank."""
        self._wait(sent.work, sent.message, sent.message.receiver)

    def await_message(self, message: Message) -> None:
        """Wait for the oldest posted receive of the sender."""
        posted = self._posted[message.sender][0]
        assert posted.message is message
        self._wait(posted.work, message, message.sender)

    def take(self, message: Message) -> list[torch.Tensor]:
        """The parts as views of their buffer; also posts the next receive."""
        posted = self._posted[message.sender].popleft()
        self._post(message.sender)
        return unpacked(message, posted.buffer)

    def drain(self) -> None:
        """Wait until everything is sent."""
        for sending in self._sending.values():
            while sending:
                self._settle(sending.popleft())

    def announce(self, values: list[float], what: str) -> Callable[[], list[list[float]]]:
        """Exchange a few numbers of every rank; ranks with little work wait for the busiest."""
        own = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self._world.size)]
        actions = self._actions
        work: dist.Work | None = None
        with self._failing(f"{what} of all ranks", -1):
            work = dist.all_gather(rows, own, group=self._sums, async_op=True)

        def of_all() -> list[list[float]]:
            bound_s = self._world.timeout_s * max(actions, self._actions)
            WATCH.wait = CurrentWait(
                lambda: f"{what} of all ranks", -1, "numbers", time.perf_counter()
            )
            with self._failing(f"{what} of all ranks", -1):
                assert work is not None
                work.wait(timedelta(seconds=bound_s))
            WATCH.wait = None
            return [row.tolist() for row in rows]

        return of_all

    def abort(self) -> None:
        """Close the connections; operations of peers then raise an error."""
        for group in dict.fromkeys(self._groups.values()):
            self._world.abandon(group)
        self.close()

    def close(self) -> None:
        """Let go of everything that keeps a connection open; the world destroys its groups."""
        self._groups.clear()
        self._sums = None
        for waiting in (self._waiting, self._posted, self._sending):
            waiting.clear()

    def _post(self, peer: int) -> None:
        """Post receives from ``peer`` as far ahead as the limits allow, in the sender's order."""
        waiting, posted = self._waiting[peer], self._posted[peer]
        ahead = sum(entry.message.bytes for entry in posted)
        # A sender that has filled its window would wait for the oldest of these.
        most = self._window or len(waiting) + 1
        while waiting and (
            not posted or (len(posted) < most and ahead + waiting[0].bytes <= POSTED_BYTES)
        ):
            message = waiting.popleft()
            ahead += message.bytes
            buffer = empty_buffer(message, self._world.device)
            group = self._groups[message.sender, message.receiver]
            try:
                work = dist.irecv(buffer, message.sender, group=group)
            except RuntimeError as cause:
                # The sender has ended since the last message.
                raise self._failure(cause, str(message), peer) from cause
            posted.append(Posted(message, buffer, work))

    def _wait(self, work: dist.Work | None, message: Message, peer: int) -> None:
        if work is None:
            return
        WATCH.wait = CurrentWait(lambda: str(message), peer, "", time.perf_counter())
        with self._failing(str(message), peer):
            # NCCL only orders streams here and is bounded by its own watchdog.
            if self._world.backend == "nccl":
                work.wait()
            else:
                work.wait(timedelta(seconds=self._world.timeout_s))
        WATCH.wait = None

    @contextmanager
    def _failing(self, what: str, peer: int) -> Iterator[None]:
        """Within, failed operations of torch raise an error that names the rank and the wait."""
        try:
            yield
        except RuntimeError as cause:
            raise self._failure(cause, what, peer) from cause

    def _failure(self, cause: RuntimeError, what: str, peer: int) -> RunFailed:
        """The error that names the rank and the wait."""
        who = f"rank {peer}" if peer >= 0 else "a rank"
        text = f"{who} ended or failed while rank {self._world.rank} waited for {what}"
        return failure_of(cause, self._world, what, PeerVanished(peer, text))


class GroupInlet:
    """The receiving end of one message; see `Inlet`."""

    def __init__(self, transport: GroupTransport, message: Message) -> None:
        self._transport, self._message = transport, message

    def wait(self) -> None:
        """Wait for the oldest posted receive of the sender."""
        self._transport.await_message(self._message)

    def take(self) -> list[torch.Tensor]:
        """The parts as views of their buffer; also posts the next receive."""
        return self._transport.take(self._message)


def groups_of_pairs(
    world: World, pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """The group that carries the messages of each pair (sender, receiver) of this rank."""
    made: dict[object, dist.ProcessGroup | None] = {}
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    for pair in sorted(set(pairs)):
        sender, receiver = pair
        shared = world.backend != "nccl"
        key = sender < receiver if shared else pair
        if key not in made:
            made[key] = world.new_group(range(world.size) if shared else pair)
        group = made[key]
        if group is not None and world.rank in pair:
            groups[pair] = group
    return groups


def aligned(size: int) -> int:
    """``size`` rounded up, so that every part of a packed message can be viewed as its type."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def empty_buffer(message: Message, device: torch.device) -> torch.Tensor:
    """A buffer for a message: of its part's type and shape, or of bytes for several parts."""
    if len(message.parts) == 1:
        part = message.parts[0]
        return torch.empty(part.shape, dtype=part.dtype, device=device)
    size = sum(aligned(part.bytes) for part in message.parts)
    return torch.empty(size, dtype=torch.uint8, device=device)


def packed(message: Message, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One contiguous tensor to send: a single part itself, several parts copied into a buffer."""
    if len(tensors) == 1:
        return tensors[0].detach().contiguous()
    buffer = empty_buffer(message, tensors[0].device)
    for part, place, tensor in zip(message.parts, unpacked(message, buffer), tensors, strict=True):
        if part.bytes:
            place.copy_(tensor.detach())
    return buffer


def unpacked(message: Message, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a received message, as views."""
    if len(message.parts) == 1:
        return [buffer]
    tensors: list[torch.Tensor] = []
    start = 0
    for part in message.parts:
        tensors.append(view_of(buffer, start, part))
        start += aligned(part.bytes)
    return tensors


def view_of(buffer: torch.Tensor, start: int, part: MessagePart) -> torch.Tensor:
    """The bytes of one part, viewed in its type and shape."""
    return buffer[start : start + part.bytes].view(part.dtype).view(part.shape)
