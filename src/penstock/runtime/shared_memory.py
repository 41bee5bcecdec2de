"""Messages between ranks of one host through rings in shared memory.

One ring for each direction of each pair of ranks that talk, written by one process and read by
one. A tensor takes one slot, a larger one several. Against two system calls and two threads for
every Gloo message, a message here is one copy in, one copy out and two counters.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from penstock.runtime.messages import Message
from penstock.runtime.shared_segment import (
    CACHE_LINE_BYTES,
    RingSize,
    Segment,
    Segments,
    Word,
    own_core,
)
from penstock.schedule.action import Action

__all__ = ["SharedMemoryTransport", "ring_size"]

SLOT_LIMIT_BYTES = 1 << 20
RING_LIMIT_BYTES = 16 << 20
LEAST_SLOTS = 4
HEAD, TAIL = 0, CACHE_LINE_BYTES // 8
VIEWS_KEPT = 4096
KIND_CODES = {kind: code for code, kind in enumerate("FBIWR", 1)}


def ring_size(messages: Sequence[Message]) -> RingSize:
    """Room for all ``messages`` of an iteration where that is little, else for a few."""
    parts = [part.bytes for message in messages for part in message.parts]
    largest = max(parts, default=1)
    slot = min(-(-largest // CACHE_LINE_BYTES) * CACHE_LINE_BYTES, SLOT_LIMIT_BYTES)
    wanted = sum(-(-size // slot) for size in parts)
    return RingSize(max(LEAST_SLOTS, min(wanted, RING_LIMIT_BYTES // slot)), slot)


class Ring:
    """The slots from one rank to another, seen by either of them.

    ``head`` counts the slots ever written, ``tail`` those ever read; each is written at one end.
    """

    def __init__(self, segment: Segment, sender: int) -> None:
        start, size = segment.rings[sender]
        self.slots, self.slot_bytes = size.slots, size.slot_bytes
        self.counters = memoryview(segment.memory)[start : start + 2 * CACHE_LINE_BYTES].cast("Q")
        self.head = self.tail = 0
        self._memory = segment.memory
        self._data = start + 2 * CACHE_LINE_BYTES
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def slot(self, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Slot ``number`` (counted without end) as a tensor."""
        key = (number % self.slots, dtype, shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= VIEWS_KEPT:
                self._views.clear()
            place = self._data + key[0] * self.slot_bytes
            count = torch.Size(shape).numel()
            flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=place)
            view = self._views[key] = flat.view(shape)
        return view

    def has_room(self) -> bool:
        """At the writing end: whether a slot is free."""
        if self.head - self.tail < self.slots:
            return True
        self.tail = self.counters[TAIL]
        return self.head - self.tail < self.slots


class SharedMemoryTransport:
    """The rings of one rank; see `penstock.runtime.transport.Transport`."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        self._segments = segments
        self._on_cpu = device.type == "cpu"
        self._device = device
        rank = segments.rank
        self._into = {
            peer: Ring(segment, rank)
            for peer, segment in segments.peers.items()
            if rank in segment.rings
        }
        self._from = {peer: Ring(segments.own, peer) for peer in segments.own.rings}
        self._unsent: dict[int, deque[torch.Tensor]] = {peer: deque() for peer in self._into}
        self._unsent_count = 0

    def begin(self, streams: Mapping[int, Sequence[Message]]) -> None:
        """Nothing to prepare: the rings are always open."""

    def at(self, action: Action) -> None:
        """Note the action where the peers can read it."""
        words = self._segments.own.words
        words[Word.POSITION] = (
            KIND_CODES[action.kind] << 48 | action.stage << 32 | action.micro_batch
        )
        words[Word.CORE] = own_core()

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Copy into the ring what has room; the rest follows when this rank waits or sends."""
        peer = message.receiver
        ring = self._into[peer]
        unsent = self._unsent[peer]
        if unsent:
            self._flush_one(peer)
        for tensor in tensors:
            for piece in pieces(tensor.detach(), ring.slot_bytes):
                if not unsent and ring.has_room():
                    ring.slot(ring.head, piece.dtype, tuple(piece.shape)).copy_(piece)
                    ring.head += 1
                else:
                    unsent.append(piece)
                    self._unsent_count += 1
        self._publish(peer, ring)

    def await_message(self, message: Message) -> None:
        """Wait for the first slot of ``message``."""
        self._await_slot(self._from[message.sender], message)

    def take(self, message: Message) -> list[torch.Tensor]:
        """Copy the parts of ``message`` out of the ring."""
        peer = message.sender
        ring = self._from[peer]
        tensors: list[torch.Tensor] = []
        for part in message.parts:
            if part.bytes <= ring.slot_bytes:
                if part.bytes:
                    self._await_slot(ring, message)
                    view = ring.slot(ring.tail, part.dtype, part.shape)
                    tensors.append(view.clone() if self._on_cpu else view.to(self._device))
                    self._release_slot(ring, peer)
                else:
                    tensors.append(torch.empty(part.shape, dtype=part.dtype, device=self._device))
            else:
                tensors.append(self._receive_pieces(ring, message, part.shape, part.dtype))
        return tensors

    def drain(self) -> None:
        """Wait until all that was sent is in the rings."""
        if not self._unsent_count:
            return
        owing = [str(peer) for peer, unsent in self._unsent.items() if unsent]
        self._segments.wait(
            lambda: not self._unsent_count,
            lambda: f"room to send to rank {', '.join(owing)}",
            advance=self._flush,
        )

    def exchange(self, values: list[float], what: str) -> list[list[float]]:
        """A few numbers of every rank."""
        return self._segments.exchange(values, what)

    def abort(self) -> None:
        """Raise the flag that peers look at while they wait."""
        self._segments.abort()

    def close(self) -> None:
        """Close the handles; the memory goes with the last process that has it open."""
        self._segments.close()

    def _receive_pieces(
        self, ring: Ring, message: Message, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        for piece in pieces(whole, ring.slot_bytes):
            self._await_slot(ring, message)
            piece.copy_(ring.slot(ring.tail, dtype, tuple(piece.shape)))
            self._release_slot(ring, message.sender)
        return whole

    def _await_slot(self, ring: Ring, message: Message) -> None:
        """Wait until there is something to read; ``ring.head`` is the last count that was seen."""
        if ring.head > ring.tail:
            return
        counters, tail = ring.counters, ring.tail
        if counters[HEAD] <= tail:
            self._segments.wait(
                lambda: counters[HEAD] > tail,
                lambda: self._describe(message),
                message.sender,
                self._flush if self._unsent_count else None,
            )
        ring.head = counters[HEAD]

    def _release_slot(self, ring: Ring, peer: int) -> None:
        ring.tail += 1
        ring.counters[TAIL] = ring.tail
        segment = self._segments.peers[peer]
        if segment.words[Word.ASLEEP] == 2:
            segment.ring_bell()

    def _publish(self, peer: int, ring: Ring) -> None:
        ring.counters[HEAD] = ring.head
        segment = self._segments.peers[peer]
        if segment.words[Word.ASLEEP]:
            segment.ring_bell()

    def _flush(self) -> bool:
        """Move waiting pieces into their rings; whether some are left."""
        for peer, unsent in self._unsent.items():
            if unsent:
                self._flush_one(peer)
        return self._unsent_count > 0

    def _flush_one(self, peer: int) -> None:
        ring, unsent = self._into[peer], self._unsent[peer]
        before = ring.head
        while unsent and ring.has_room():
            piece = unsent.popleft()
            self._unsent_count -= 1
            ring.slot(ring.head, piece.dtype, tuple(piece.shape)).copy_(piece)
            ring.head += 1
        if ring.head != before:
            self._publish(peer, ring)

    def _describe(self, message: Message) -> str:
        code = self._segments.peers[message.sender].words[Word.POSITION]
        if not code:
            return f"{message}, which has not started"
        kind = "FBIWR"[(code >> 48) - 1]
        return f"{message}, which is at {kind}{code & 0xFFFFFFFF}"


def pieces(tensor: torch.Tensor, limit_bytes: int) -> Sequence[torch.Tensor]:
    """The tensor itself where it fits, else flat runs of it; nothing of an empty one."""
    size = tensor.nbytes
    if size <= limit_bytes:
        return (tensor,) if size else ()
    return tensor.contiguous().view(-1).split(limit_bytes // tensor.element_size())
