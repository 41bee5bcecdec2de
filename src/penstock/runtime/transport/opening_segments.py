"""Creates this rank's shared segment and opens those of its peers."""

import mmap
import os
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from penstock.runtime.processes.world import World
from penstock.runtime.transport.segments import HEADER_BYTES, RingSize, Segments, SharedSegment

__all__ = ["join_segments", "open_memory", "supported"]


@dataclass(frozen=True)
class Invitation:
    """What a peer needs to open a segment."""

    pid: int
    memory: int
    bell: int
    size_bytes: int
    rings: dict[int, tuple[int, RingSize]]


def supported() -> bool:
    """Whether this system supports the shared memory used here.

    The rings need stores to become visible in program order, which x86-64 guarantees.
    """
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def join_segments(
    world: World, rings_in: Mapping[int, RingSize], *, spin_s: float
) -> Segments | None:
    """Create this rank's segment and open the others'; ``None`` on all ranks if any rank fails."""
    size = HEADER_BYTES
    rings: dict[int, tuple[int, RingSize]] = {}
    for sender, ring in rings_in.items():
        rings[sender] = (size, ring)
        size += -(-ring.bytes // HEADER_BYTES) * HEADER_BYTES
    with ExitStack() as undo, ExitStack() as opening:
        memory = os.memfd_create("penstock")
        opening.callback(os.close, memory)
        os.ftruncate(memory, size)
        ear, bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        undo.callback(os.close, ear)
        own = SharedSegment(mmap.mmap(memory, size), rings, bell)
        undo.callback(own.close_handles)
        invitations = world.gather(
            Invitation(os.getpid(), memory, bell, size, rings), Invitation, RingSize
        )

        def open_all() -> dict[int, SharedSegment]:
            return {
                rank: own if rank == world.rank else accept(invitation, undo)
                for rank, invitation in enumerate(invitations)
            }

        try:
            segments = world.agreed(open_all, OSError)
        except OSError:
            return None
        undo.pop_all()
        return Segments(world.rank, segments, ear, world.timeout_s, spin_s)


def accept(invitation: Invitation, undo: ExitStack) -> SharedSegment:
    """Open a peer's segment, its bell, and a handle that becomes readable when its process ends.

    ``undo`` closes the handles.
    """
    view = open_memory(invitation.pid, invitation.memory, invitation.size_bytes)
    bell = os.open(
        f"/proc/{invitation.pid}/fd/{invitation.bell}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    )
    segment = SharedSegment(view, invitation.rings, bell)
    undo.callback(segment.close_handles)
    segment.process = os.pidfd_open(invitation.pid)
    return segment


def open_memory(process: int, handle: int, size_bytes: int) -> mmap.mmap:
    """Map the anonymous memory that ``process`` (possibly this one) has open as ``handle``.

    Raises:
        OSError: the system does not allow it.
    """
    memory = os.open(f"/proc/{process}/fd/{handle}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(memory, size_bytes)
    finally:
        os.close(memory)
