"""What worker processes run: the staged transport on the CPU, whose copies are late here."""

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import stand_in_gpu
import torch
from runtime.matrix_cases import play
from runtime.matrix_plans import Case

from penstock.device import CopyStream
from penstock.runtime.transport import open_transport
from penstock.runtime.transport.shared_memory import staged
from penstock.runtime.transport.shared_memory.rings import SharedMemoryTransport

LATEST_S = 2e-3


class LateMark:
    """The end of a copy, which happens at some time."""

    def __init__(self, stream: "LateStream", due_s: float) -> None:
        self.stream, self.due_s = stream, due_s

    def query(self) -> bool:
        now_s = time.perf_counter()
        self.stream.advance(now_s)
        return now_s >= self.due_s

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.due_s - time.perf_counter()))
        self.stream.advance(self.due_s)


class LateStream:
    """A stream of copies as `CopyStream`, in order; each reads and writes when it is due.

    Like a GPU it keeps no tensor, and takes no notice of what the host does meanwhile.
    """

    launched = 0

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._copies: deque[tuple[float, Any, Any]] = deque()
        self._random = random.Random(device.index)
        self._due_s = 0.0

    def follow(self) -> None:
        """The CPU has computed all that it was given."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> LateMark:
        LateStream.launched += 1
        with self._lock:
            late_s = self._random.choice((0.0, 0.1, 1.0)) * LATEST_S
            self._due_s = max(self._due_s, time.perf_counter() + late_s)
            self._copies.append((self._due_s, weakref.ref(target), weakref.ref(source)))
            return LateMark(self, self._due_s)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # What has not arrived yet is seen.
        return torch.full(shape, 7, dtype=dtype)

    def hand_over(self, tensors: Sequence[torch.Tensor]) -> None:
        """Computing waits for the copies."""
        LateMark(self, self._due_s).synchronize()

    def advance(self, now_s: float) -> None:
        with self._lock:
            while self._copies and self._copies[0][0] <= now_s:
                _, target, source = self._copies.popleft()
                assert target() is not None and source() is not None, "freed before it was copied"
                target().copy_(source())


def stage(slot_limit: int | None = None) -> None:
    """Let this process take the staged transport, and Gloo for sums, as ranks of one GPU do."""
    patched: Any = staged
    patched.CopyStream, patched.pinned_memory, patched.unpinned = LateStream, lambda *_: True, id
    every: Any = open_transport
    every.is_gpu = lambda device: True
    plain: Any = SharedMemoryTransport
    plain.share_sums = lambda self, buckets: None
    if slot_limit is not None:
        staged.StagedTransport.slot_limit = staged.StagedTransport.ring_limit = slot_limit


def play_staged(
    cases: Sequence[Case], slot_limit: int | None = None
) -> tuple[int, dict[Case, list[str]]]:
    """How many copies this rank launched, and what is wrong in each case on it."""
    stage(slot_limit)
    found = play(cases)
    return LateStream.launched, found


class LateEvent(stand_in_gpu.Event):
    """An event of the stand-in GPU that is over some time after it is recorded."""

    due_s = 0.0

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.due_s = time.perf_counter() + LATEST_S

    def query(self) -> bool:
        return time.perf_counter() >= self.due_s

    def synchronize(self) -> None:
        super().synchronize()
        time.sleep(max(0.0, self.due_s - time.perf_counter()))


def play_on_one_gpu(cases: Sequence[Case]) -> tuple[int, dict[Case, list[str]], list[str]]:
    """This rank's copies, what is wrong, and where the host waited, on a shared stand-in GPU.

    Sums over Gloo make it wait, and so do models that go by values; copies must not.
    """
    stand_in_gpu.install(1)
    patched: Any = torch.cuda
    patched.Event = LateEvent
    launched: list[int] = []
    copy = CopyStream.copy

    def counted(self: CopyStream, target: torch.Tensor, source: torch.Tensor) -> Any:
        launched.append(target.nbytes)
        return copy(self, target, source)

    CopyStream.copy = counted
    found = play(cases, "cuda:0")
    waits = [wait for wait in stand_in_gpu.waits() if wait.within("execute")]
    by_copies = {f"{wait.why} at {wait.calls[0]}" for wait in waits if "copy" in wait.why}
    return len(launched), found, sorted(by_copies)
