"""Messages by torch.distributed's point-to-point operations: Gloo, or NCCL between GPUs.

Under NCCL one communicator carries all messages, and runs a rank's operations one after another,
whoever the peers are. So sends and receives are issued in the planned order
(`penstock.schedule.message_order`), a receive no earlier than the action before which it is
planned: it occupies the GPU until its message comes, and CUDA waits for an idle GPU whenever it
loads a kernel. The host is some actions ahead of the GPU, so the receive is early all the same.

Gloo has no such order, and a message whose receive is posted before it is sent takes one way over
the network instead of three. So there receives do not wait for this rank's sends, unless much is
already posted ahead. Gloo has two groups, one for messages to higher ranks and one for those to
lower ranks, because each group has a thread and sockets of its own.

Gloo keeps a tensor until its sender has waited for it, and does not report whether it has arrived.
So a rank that has much under way to a peer waits for the oldest before it sends the next, which
bounds the memory of sent tensors, however many micro-batches a batch has. Before that wait it posts
all receives that the planned order has before that message. So the first message of the planned
order that has not arrived is never waited for in vain, since its receiver, whatever it waits for,
has posted its receive, and no ranks wait for one another's.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.errors import PeerFailed, RunFailed
from penstock.runtime.processes.heartbeat import HEARTBEAT, CurrentWait
from penstock.runtime.processes.world import World, as_bytes, failure_of
from penstock.runtime.transport.messages import Message
from penstock.runtime.transport.transport import Inlet, Transport, position_code, position_words
from penstock.schedule.action import Action

POSTED_BYTES = 64 << 20
"""Limit of receives posted ahead, in bytes."""

LEAST_WINDOW = 4
"""Messages that may be under way from one rank to another, and as many as there are ranks, which
delays no schedule with early backwards."""

FREE_BYTES = 1 << 20
"""More may be under way as long as they have fewer bytes: a wait hands the core to the peer, which
takes longer than to send a small message."""

ALIGNMENT_BYTES = 16


@dataclass(slots=True)
class Posted:
    """A posted receive: its message, its buffer, and a handle to wait for it."""

    message: Message
    buffer: torch.Tensor
    work: dist.Work


class Sent(NamedTuple):
    """A message under way: its buffer, and a handle to wait for it.

    ``before`` is the number of messages to its sender before it in the planned order.
    """

    message: Message
    buffer: torch.Tensor
    work: dist.Work
    before: int


class GroupTransport(Transport):
    """Point-to-point operations of one rank; see `Transport`.

    ``pairs`` are the senders and receivers of all messages, the same on all ranks.
    """

    def __init__(self, world: World, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._world = world
        # Gloo's handle of a send is complete only when it has been waited for, and Gloo needs no
        # order of sends and receives.
        self._by_gloo = world.backend == "gloo"
        everyone = range(world.size)
        self._up = world.new_group(everyone)
        self._down = world.new_group(everyone) if self._by_gloo else self._up
        self._sums = world.new_group(everyone, "gloo")
        self._planned: deque[Message | Action] = deque()
        self._before: dict[int, int] = {}
        self._expected = self._asked_for = 0
        peers = [rank for rank in everyone if rank != world.rank]
        self._posted: dict[int, deque[Posted]] = {peer: deque() for peer in peers}
        self._posted_bytes = 0
        self._sending: dict[int, deque[Sent]] = {peer: deque() for peer in peers}
        self._window = max(LEAST_WINDOW, world.size)
        self._actions = 1
        self._position = 0
        self._limit = timedelta(seconds=world.timeout_s)
        HEARTBEAT.action = self.position
        if not self._by_gloo:
            self._connect(sorted(pairs))

    def _connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Send a byte from each rank to its receivers, in the order of ``pairs``, the same on all.

        NCCL connects two ranks when both have come to their first message, for which each host
        waits. In an iteration one of them may need something else of the other before.
        """
        own, group = self._world.rank, self._up
        assert group is not None
        byte = torch.zeros(1, dtype=torch.uint8, device=self._world.device)
        for sender, receiver in pairs:
            if sender == receiver or own not in (sender, receiver):
                continue
            with self._failing(f"the first message from rank {sender} to {receiver}", -1):
                begin, peer = (group.send, receiver) if own == sender else (group.recv, sender)
                begin([byte], peer, 0).wait()

    def begin(self) -> None:
        self._actions, self._posted_bytes = 1, 0
        self._expected = self._asked_for = 0
        self._planned.clear()
        self._before.clear()
        for posted in self._posted.values():
            posted.clear()

    def proceed(self, planned: Sequence[Message | Action]) -> None:
        """Post more receives, after those that remain."""
        own = self._world.rank
        for entry in planned:
            receives = isinstance(entry, Message) and entry.sender != own
            self._expected += receives
            if receives or not self._by_gloo:
                self._planned.append(entry)
            elif isinstance(entry, Message):
                self._before[id(entry)] = self._expected
        self._post_ahead()

    def at(self, position: int) -> None:
        """Count the actions: the time limit of `announce` is proportional to their number."""
        self._actions += 1
        self._position = position
        if not self._by_gloo:
            self._post_before(position)

    def position(self) -> str:
        return position_words(self._position)

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        return partial(self._send, message, self._sending[message.receiver])

    def inlet(self, message: Message) -> Inlet:
        return Inlet(partial(self._await_message, message), partial(self._take, message))

    def _send(
        self, message: Message, sending: deque[Sent], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Start sending; the buffer is kept until the operation is complete."""
        if self._by_gloo:
            while (
                len(sending) >= self._window
                and sum(sent.message.bytes for sent in sending) >= FREE_BYTES
            ):
                oldest = sending.popleft()
                while self._planned and self._asked_for < oldest.before:
                    self._post(self._planned.popleft())
                self._wait(oldest, message.receiver)
        else:
            while sending and sending[0].work.is_completed():
                sending.popleft()
        while not self._by_gloo and (first := self._planned.popleft()) is not message:
            self._post(first)
        buffer = packed_parts(message, tensors)
        try:
            # Of a group of all ranks: what `dist.isend` does, without its checks of each call.
            work = self._group_of(message).send([self._as_sent(buffer)], message.receiver, 0)
        except RuntimeError as cause:
            raise self._failure(cause, str(message), message.receiver) from cause
        sending.append(Sent(message, buffer, work, self._before.get(id(message), 0)))

    def _await_message(self, message: Message) -> None:
        """Wait for the oldest posted receive of the sender; first post what may be posted ahead.

        Not when a message is taken: then an action of this rank can start.
        """
        self._post_ahead()
        queue = self._posted[message.sender]
        while not queue:
            self._post(self._planned.popleft())
        posted = queue[0]
        assert posted.message is message
        self._wait(posted, message.sender)

    def _take(self, message: Message) -> list[torch.Tensor]:
        """The parts as views of their buffer."""
        posted = self._posted[message.sender].popleft()
        self._posted_bytes -= message.bytes
        return unpacked(message, posted.buffer)

    def drain(self) -> None:
        for peer, sending in self._sending.items():
            while sending:
                self._wait(sending.popleft(), peer)

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
            HEARTBEAT.wait = CurrentWait(
                lambda: f"{what} of all ranks", -1, "numbers", time.perf_counter()
            )
            with self._failing(f"{what} of all ranks", -1):
                assert work is not None
                work.wait(timedelta(seconds=bound_s))
            HEARTBEAT.wait = None
            return [row.tolist() for row in rows]

        return of_all

    def abort(self) -> None:
        """Close the connections; operations of peers then raise an error."""
        for group in dict.fromkeys((self._up, self._down)):
            if group is not None:
                self._world.abandon(group)
        self.close()

    def close(self) -> None:
        """Release everything that keeps a connection open; the world destroys its groups."""
        self._up = self._down = self._sums = None
        self._planned.clear()
        for under_way in (*self._posted.values(), *self._sending.values()):
            under_way.clear()

    def _post_ahead(self) -> None:
        """Post receives as far ahead as the limits allow (Gloo)."""
        while self._planned and self._by_gloo:
            message = self._planned[0]
            assert isinstance(message, Message)
            posted = self._posted[message.sender]
            is_small = self._posted_bytes + message.bytes <= FREE_BYTES
            if len(posted) >= self._window and not is_small:
                return
            if posted and self._posted_bytes + message.bytes > POSTED_BYTES:
                return
            self._post(self._planned.popleft())

    def _post_before(self, position: int) -> None:
        """Post the receives that are planned before the action at ``position``."""
        own = (position_code(entry) for entry in self._planned if isinstance(entry, Action))
        if position not in own:
            return
        while True:
            first = self._planned.popleft()
            if isinstance(first, Action) and position_code(first) == position:
                return
            self._post(first)

    def _post(self, message: Message | Action) -> None:
        """Start to receive ``message``; an action of this rank that is over needs nothing."""
        if isinstance(message, Action):
            return
        peer = message.sender
        assert peer != self._world.rank, f"{message} is to be sent before what is waited for"
        buffer = empty_buffer(message, self._world.device)
        try:
            work = self._group_of(message).recv([self._as_sent(buffer)], peer, 0)
        except RuntimeError as cause:
            # The sender has ended since the last message.
            raise self._failure(cause, str(message), peer) from cause
        self._asked_for += 1
        self._posted_bytes += message.bytes
        self._posted[peer].append(Posted(message, buffer, work))

    def _as_sent(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer as the backend takes it: NCCL has fewer types than torch, but bytes."""
        return buffer if self._by_gloo else as_bytes(buffer)

    def _group_of(self, message: Message) -> dist.ProcessGroup:
        group = self._up if message.sender < message.receiver else self._down
        assert group is not None, "the transport is closed"
        return group

    def _wait(self, under_way: Posted | Sent, peer: int) -> None:
        """Wait until a message has come, or, if this rank sends it, has at least left."""
        message, work = under_way.message, under_way.work
        HEARTBEAT.wait = CurrentWait(message.__str__, peer, "", time.perf_counter())
        try:  # not `_failing`, which takes longer: this is done for every message
            # NCCL only orders streams here; see `DeviceClock` for the wait.
            if self._by_gloo:
                work.wait(self._limit)
            else:
                work.wait()
        except RuntimeError as cause:
            raise self._failure(cause, str(message), peer) from cause
        HEARTBEAT.wait = None

    @contextmanager
    def _failing(self, what: object, peer: int) -> Iterator[None]:
        """Raise an error that names the rank and the wait for failed operations of torch."""
        try:
            yield
        except RuntimeError as cause:
            raise self._failure(cause, str(what), peer) from cause

    def _failure(self, cause: RuntimeError, what: str, peer: int) -> RunFailed:
        who = f"rank {peer}" if peer >= 0 else "a rank"
        text = f"{who} ended or failed while rank {self._world.rank} waited for {what}"
        return failure_of(cause, self._world, what, PeerFailed(text))


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


def packed_parts(message: Message, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
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
        own = buffer[start : start + part.bytes]
        tensors.append(own.view(part.dtype).view(part.shape))
        start += aligned(part.bytes)
    return tensors
