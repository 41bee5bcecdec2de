"""Messages between ranks that share a GPU: the rings of a host, between which the device copies.

A tensor leaves the device on a stream of its own, and enters it on another. The host launches the
copies and continues. A slot's counter may move only when its copy is over, and then at once,
whatever the host does: it may wait for a sum of replicas, whose other ranks wait for this message.
So a thread for each direction waits for the copies in their order and moves the counters. Then a
message arrives in finite time after it is sent, as if its sender had waited for the copy, and no
order of actions gets stuck that does not get stuck with copies that wait.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition, Thread
from typing import NamedTuple

import torch

from penstock.device import CopyStream, Mark, pinned_memory, unpinned
from penstock.errors import RunFailed
from penstock.runtime.processes.world import World
from penstock.runtime.transport.messages import Message
from penstock.runtime.transport.shared_memory.rings import (
    HEAD,
    TAIL,
    SharedMemoryTransport,
    SlotRing,
    pieces,
)
from penstock.runtime.transport.shared_memory.segments import ASLEEP, Segments, SharedSegment
from penstock.runtime.transport.transport import Inlet

LOOK_S = 1e-4
"""Seconds between two looks of a thread for room in a ring."""

LEAVE_S = 5.0
"""Seconds that a rank that has failed waits for the end of its copies."""


class Copy(NamedTuple):
    """A copy under way; ``publish`` reports its end. It uses ``tensor`` until then."""

    mark: Mark
    publish: Callable[[], None]
    tensor: torch.Tensor


class CopyThread:
    """The copies of one direction, in order; a thread publishes those that are over.

    ``launch`` launches what waits for room, and returns whether some is left. It is called under
    ``changed``. The thread wakes the owner of ``own``, this rank's segment, when nothing is left.
    """

    def __init__(self, name: str, own: SharedSegment, launch: Callable[[], bool]) -> None:
        self.changed = Condition()
        self.under_way: deque[Copy] = deque()
        self._own, self._launch = own, launch
        self._failure: Exception | None = None
        self._ends = False
        self._thread = Thread(target=self._run, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def has_work(self) -> bool:
        """Return whether copies are under way or wait for room."""
        if self._failure is not None:
            raise RunFailed(f"a message could not be copied: {self._failure}") from self._failure
        with self.changed:
            return self._launch() or bool(self.under_way)

    def close(self, limit_s: float | None) -> bool:
        """End when the copies under way are over; false if that is not so after ``limit_s``."""
        with self.changed:
            self._ends = True
            self.changed.notify()
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (first := self._first()) is not None:
                first.mark.synchronize()
                with self.changed:
                    while self.under_way and self.under_way[0].mark.query():
                        self.under_way.popleft().publish()
                if self._own.words[ASLEEP] and not self.under_way:
                    self._own.wake()
        except Exception as cause:  # the rank raises it where it waits
            self._failure = cause

    def _first(self) -> Copy | None:
        """The oldest copy under way, once there is one; ``None`` at the end."""
        with self.changed:
            while True:
                waits = self._launch()
                if self.under_way:
                    return self.under_way[0]
                if self._ends:
                    return None
                self.changed.wait(LOOK_S if waits else None)


class StagedTransport(SharedMemoryTransport):
    """The rings of one rank on a GPU that others use too; see `Transport`."""

    # A piece takes a mark and two wake-ups, so large ones are worth their memory.
    slot_limit = 4 << 20
    ring_limit = 32 << 20

    def __init__(self, world: World, segments: Segments) -> None:
        super().__init__(world, segments)
        memories = [ring.whole() for ring in (*self._into.values(), *self._from.values())]
        self._pinned = [memory for memory in memories if pinned_memory(memory, world.device)]
        self._leaving, self._entering = CopyStream(world.device), CopyStream(world.device)
        self._sender = CopyThread(
            "sends", segments.own, lambda: any([self._launch(peer) for peer in self._unsent])
        )
        self._receiver = CopyThread("receives", segments.own, lambda: False)

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        return partial(self._send, message.receiver)

    def inlet(self, message: Message) -> Inlet:
        ring = self._from[message.sender]
        return Inlet(partial(self._await_slot, ring, message), partial(self._take, ring, message))

    def drain(self) -> None:
        """Wait until the ring has all that was sent, so that its tensors are free."""
        if self._sender.has_work():
            what = "its messages to leave the device, and for room to send them"
            self.segments.wait(lambda: not self._sender.has_work(), lambda: what)

    def abort(self) -> None:
        self._leave(LEAVE_S)
        super().abort()

    def close(self) -> None:
        self._leave(None)
        super().close()

    def _leave(self, limit_s: float | None) -> None:
        ended = [thread.close(limit_s) for thread in (self._sender, self._receiver)]
        while self._pinned and all(ended):
            unpinned(self._pinned.pop())

    def _own_work(self) -> Callable[[], bool]:
        # The threads move the copies; this only raises their errors.
        return lambda: self._sender.has_work() and self._receiver.has_work() and False

    def _send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Launch the copies of a message; the thread launches those without room later."""
        slot_bytes = self._into[peer].slot_bytes
        whole = [tensor.detach().contiguous() for tensor in tensors]
        with self._sender.changed:
            self._leaving.follow()
            for tensor in whole:
                self._unsent[peer] += pieces(tensor, slot_bytes)
            self._launch(peer)
            self._sender.changed.notify()

    def _launch(self, peer: int) -> bool:
        """Launch copies into the free slots of a ring; returns whether some are left."""
        ring, unsent, segment = self._into[peer], self._unsent[peer], self.segments.peers[peer]
        while unsent and ring.has_free_slot():
            piece = unsent.popleft()
            slot = ring.slot(ring.head, piece)
            ring.head += 1

            def publish(number: int = ring.head) -> None:
                ring.counters[HEAD] = number
                if segment.words[ASLEEP]:
                    segment.wake()

            self._sender.under_way.append(Copy(self._leaving.copy(slot, piece), publish, piece))
        return bool(unsent)

    def _take(self, ring: SlotRing, message: Message) -> list[torch.Tensor]:
        """Launch the copies out of the ring; all that the device computes from now on waits."""
        tensors = [self._entering.empty(part.shape, part.dtype) for part in message.parts]
        for tensor in tensors:
            for piece in pieces(tensor, ring.slot_bytes):
                self._await_slot(ring, message)
                slot = ring.slot(ring.tail, piece)
                ring.tail += 1
                publish = partial(ring.counters.__setitem__, TAIL, ring.tail)
                with self._receiver.changed:
                    copied = Copy(self._entering.copy(piece, slot), publish, piece)
                    self._receiver.under_way.append(copied)
                    self._receiver.changed.notify()
        self._entering.hand_over(tensors)
        return tensors
