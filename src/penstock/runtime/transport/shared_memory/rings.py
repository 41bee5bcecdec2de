"""Messages between ranks of one host through rings in shared memory.

There is one ring for each direction of each pair of communicating ranks, with one writer and one
reader. A tensor takes one slot, a larger one several. A Gloo message takes two system calls and two
threads; a message here takes one copy in, one copy out and two counters.
"""

import mmap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Self

import torch

from penstock.runtime.gradients.buckets import GradientBucket
from penstock.runtime.processes.heartbeat import HEARTBEAT
from penstock.runtime.processes.world import World
from penstock.runtime.transport.messages import Message
from penstock.runtime.transport.shared_memory.segments import (
    ASLEEP,
    CACHE_LINE_BYTES,
    CORE,
    POSITION,
    RingSize,
    Segments,
    SharedSegment,
    join_segments,
    own_core,
)
from penstock.runtime.transport.shared_memory.sums import share_sums
from penstock.runtime.transport.transport import Inlet, Transport, position_words

LEAST_SLOTS = 4
HEAD, TAIL = 0, CACHE_LINE_BYTES // 8
KINDS_KEPT = 64


def ring_size(messages: Sequence[Message], slot_limit: int, ring_limit: int) -> RingSize:
    """A ring for all ``messages`` of an iteration if they are small, else for a few."""
    parts = [part.bytes for message in messages for part in message.parts]
    largest = max(parts, default=1)
    slot = min(-(-largest // CACHE_LINE_BYTES) * CACHE_LINE_BYTES, slot_limit)
    wanted = sum(-(-size // slot) for size in parts)
    return RingSize(max(LEAST_SLOTS, min(wanted, ring_limit // slot)), slot)


class SlotViews(dict[int, torch.Tensor]):
    """Slots as tensors of one type and shape, by their places; each is made when first used."""

    def __init__(
        self,
        memory: mmap.mmap,
        start: int,
        slot_bytes: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> None:
        self._memory, self._start, self._slot_bytes = memory, start, slot_bytes
        self._dtype, self._shape = dtype, shape

    def __missing__(self, place: int) -> torch.Tensor:
        start, count = self._start + place * self._slot_bytes, prod(self._shape)
        flat = torch.frombuffer(self._memory, dtype=self._dtype, count=count, offset=start)
        view = self[place] = flat.view(self._shape)
        return view


class SlotRing:
    """The slots from one rank to another, used by either of them.

    ``head`` counts the slots ever written, ``tail`` those ever read. One end writes each counter.
    """

    def __init__(self, segment: SharedSegment, sender: int) -> None:
        self._memory, (self._start, size) = segment.memory, segment.rings[sender]
        self.slots, self.slot_bytes, self.bytes = size.slots, size.slot_bytes, size.bytes
        self._data = self._start + 2 * CACHE_LINE_BYTES
        self.counters = memoryview(segment.memory)[self._start : self._data].cast("Q")
        self.head = self.tail = 0
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], SlotViews] = {}

    def whole(self) -> torch.Tensor:
        """The memory of counters and slots."""
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=self.bytes, offset=self._start
        )

    def slot(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Slot ``number`` (modulo the number of slots) as a tensor ``like`` another."""
        return self.views(like.dtype, tuple(like.shape))[number % self.slots]

    def views(self, dtype: torch.dtype, shape: tuple[int, ...]) -> SlotViews:
        """The slots as tensors of one type and shape."""
        found = self._views.get((dtype, shape))
        if found is None:
            if len(self._views) >= KINDS_KEPT:
                self._views.clear()
            found = SlotViews(self._memory, self._data, self.slot_bytes, dtype, shape)
            self._views[dtype, shape] = found
        return found

    def has_free_slot(self) -> bool:
        """Return whether a slot is free; for the writing end."""
        if self.head - self.tail < self.slots:
            return True
        self.tail = self.counters[TAIL]
        return self.head - self.tail < self.slots


class SharedMemoryTransport(Transport):
    """The rings of one rank; see `Transport`. A slot and a ring have limits, in bytes."""

    slot_limit = 1 << 20
    ring_limit = 2 << 20

    def __init__(self, world: World, segments: Segments) -> None:
        self.segments = segments
        self._world = world
        self._words = segments.own.words
        HEARTBEAT.action = self.position
        rank = segments.rank
        self._into = {
            peer: SlotRing(segment, rank)
            for peer, segment in segments.peers.items()
            if rank in segment.rings
        }
        self._from = {peer: SlotRing(segments.own, peer) for peer in segments.own.rings}
        self._unsent: dict[int, deque[torch.Tensor]] = {peer: deque() for peer in self._into}

    @classmethod
    def opened(
        cls, world: World, incoming: Mapping[int, Sequence[Message]], spin_s: float
    ) -> Self | None:
        """Join the memory of all ranks; ``None`` on all of them if it cannot be shared.

        ``incoming`` are the messages of a full iteration to this rank, by sender.
        """
        rings = {
            sender: ring_size(messages, cls.slot_limit, cls.ring_limit)
            for sender, messages in incoming.items()
            if messages
        }
        segments = join_segments(world, rings, spin_s=spin_s)
        return cls(world, segments) if segments is not None else None

    def at(self, position: int) -> None:
        words = self._words
        words[POSITION] = position
        words[CORE] = own_core()

    def position(self) -> str:
        return position_words(self._words[POSITION])

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        """A function that sends ``message``; it writes into the next slot at once if possible."""
        peer = message.receiver
        ring, unsent = self._into[peer], self._unsent[peer]
        if len(message.parts) != 1 or not 0 < message.bytes <= ring.slot_bytes:
            return lambda tensors: self._send(peer, tensors)
        part, slots = message.parts[0], ring.slots
        views, counters = ring.views(part.dtype, part.shape), ring.counters
        segment = self.segments.peers[peer]
        words = segment.words

        def send(tensors: Sequence[torch.Tensor]) -> None:
            if unsent or not ring.has_free_slot():
                self._send(peer, tensors)
                return
            head = ring.head
            views[head % slots].copy_(tensors[0].detach())
            ring.head = counters[HEAD] = head + 1
            if words[ASLEEP]:
                segment.wake()

        return send

    def inlet(self, message: Message) -> Inlet:
        peer = message.sender
        ring, part = self._from[peer], message.parts[0]
        wait = partial(self._await_slot, ring, message)
        if len(message.parts) != 1 or not 0 < part.bytes <= ring.slot_bytes:
            return Inlet(wait, partial(self._take, ring, message))
        views, counters, slots = ring.views(part.dtype, part.shape), ring.counters, ring.slots
        segment = self.segments.peers[peer]
        words = segment.words

        def take() -> list[torch.Tensor]:
            tail = ring.tail
            tensor = views[tail % slots].clone()
            ring.tail = counters[TAIL] = tail + 1
            if words[ASLEEP] == 2:
                segment.wake()
            return [tensor]

        return Inlet(wait, take)

    def _send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy into free slots of the ring; the rest follows when this rank waits or sends."""
        for tensor in tensors:
            self._unsent[peer] += pieces(tensor.detach(), self._into[peer].slot_bytes)
        self._flush_one(peer)

    def _take(self, ring: SlotRing, message: Message) -> list[torch.Tensor]:
        segment = self.segments.peers[message.sender]
        tensors = [torch.empty(part.shape, dtype=part.dtype) for part in message.parts]
        for whole in tensors:
            for piece in pieces(whole, ring.slot_bytes):
                self._await_slot(ring, message)
                piece.copy_(ring.slot(ring.tail, piece))
                ring.tail = ring.counters[TAIL] = ring.tail + 1
                if segment.words[ASLEEP] == 2:
                    segment.wake()
        return tensors

    def drain(self) -> None:
        owing = [str(peer) for peer, unsent in self._unsent.items() if unsent]
        if owing:
            self.segments.wait(
                lambda: not any(self._unsent.values()),
                lambda: f"room to send to rank {', '.join(owing)}",
                advance=self._flush,
            )

    def announce(self, values: list[float], what: str) -> Callable[[], list[list[float]]]:
        return self.segments.announce(values, what, self._flush)

    def share_sums(self, buckets: Sequence[GradientBucket]) -> None:
        """Sum gradients in shared memory, if those of all ranks are in the host's."""
        if all(device == "cpu" for device in self._world.devices):
            share_sums(self._world, self.segments, buckets)

    def abort(self) -> None:
        self.segments.abort()

    def close(self) -> None:
        """Close the handles; the memory is freed when the last process closes it."""
        self.segments.close()

    def _await_slot(self, ring: SlotRing, message: Message) -> None:
        """Wait until a slot can be read; ``ring.head`` caches the latest counter value."""
        if ring.head > ring.tail:
            return
        counters, tail = ring.counters, ring.tail
        if counters[HEAD] <= tail:
            self.segments.wait(
                lambda: counters[HEAD] > tail,
                lambda: str(message),
                message.sender,
                self._own_work(),
            )
        ring.head = counters[HEAD]

    def _own_work(self) -> Callable[[], bool] | None:
        """Return the work for the time of a wait for a message; see `Segments.wait`."""
        return self._flush if any(self._unsent.values()) else None

    def _flush(self) -> bool:
        """Move unsent pieces into their rings; returns whether some are left."""
        for peer, unsent in self._unsent.items():
            if unsent:
                self._flush_one(peer)
        return any(self._unsent.values())

    def _flush_one(self, peer: int) -> None:
        ring, unsent = self._into[peer], self._unsent[peer]
        before = ring.head
        while unsent and ring.has_free_slot():
            piece = unsent.popleft()
            ring.slot(ring.head, piece).copy_(piece)
            ring.head += 1
        if ring.head != before:
            ring.counters[HEAD] = ring.head
            segment = self.segments.peers[peer]
            if segment.words[ASLEEP]:
                segment.wake()


def pieces(tensor: torch.Tensor, limit_bytes: int) -> Sequence[torch.Tensor]:
    """The tensor itself if it fits, else flat pieces of it; none of an empty tensor."""
    size = tensor.nbytes
    if size <= limit_bytes:
        return (tensor,) if size else ()
    return tensor.contiguous().view(-1).split(limit_bytes // tensor.element_size())
