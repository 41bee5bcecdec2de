"""What happened when on this rank, and the same on all ranks as one timeline."""

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from penstock.runtime.world import World
from penstock.timeline.timeline import Event, EventKind, Timeline

__all__ = ["Clock", "Record", "StepClock", "gather_timeline"]

ALIGNMENT_ROUNDS = 5


class Record(NamedTuple):
    """One event of this rank, in seconds of its own clock."""

    kind: EventKind
    stage: int
    micro_batch: int
    start_s: float
    end_s: float
    peer: int = -1
    bytes: int = 0


class Clock(Protocol):
    """Where the action loop and the channels note what they did."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    def add(
        self,
        kind: EventKind,
        stage: int,
        micro_batch: int,
        start_s: float,
        end_s: float,
        peer: int = -1,
        bytes: int = 0,
    ) -> None:
        """Note one event."""
        ...


class StepClock:
    """The records of the latest iteration; ``busy_s`` is its time in compute actions."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._records: list[tuple[EventKind, int, int, float, float, int, int]] = []
        self._flushes: list[tuple[int, int]] = []
        self.start_s = now()

    def restart(self) -> None:
        """Begin an iteration."""
        self._records = []
        self._flushes = []
        self.start_s = self.now()

    def next_flush(self, micro_batches: int) -> None:
        """Go on with another batch; its micro-batches follow the ``micro_batches`` before it."""
        self._flushes.append((len(self._records), micro_batches))

    def add(
        self,
        kind: EventKind,
        stage: int,
        micro_batch: int,
        start_s: float,
        end_s: float,
        peer: int = -1,
        bytes: int = 0,
    ) -> None:
        """Note one event."""
        self._records.append((kind, stage, micro_batch, start_s, end_s, peer, bytes))

    @property
    def records(self) -> list[Record]:
        """All that was noted, in order of being noted; micro-batches are numbered on."""
        found = [Record(*record) for record in self._records]
        for start, micro_batches in self._flushes:
            found[start:] = [
                record._replace(micro_batch=record.micro_batch + micro_batches)
                if record.micro_batch >= 0
                else record
                for record in found[start:]
            ]
        return found

    @property
    def busy_s(self) -> float:
        """Seconds spent in compute actions so far."""
        return sum(record[4] - record[3] for record in self._records if record[0] in "FBIWR")


def gather_timeline(world: World, clock: StepClock, title: str) -> Timeline:
    """The latest iteration of all ranks, from time 0 at its first event; every rank calls.

    Ranks of one host share the system's monotonic clock. Others' offsets to rank 0 are estimated
    from a few rounds of gathering: the round with the closest returns bounds the error by half of
    its duration.
    """
    gathered = world.gather((clock.start_s, clock.records))
    offsets = clock_offsets(world, clock.now)
    start = min(start_s + offset for (start_s, _), offset in zip(gathered, offsets, strict=True))
    events = [
        Event(
            rank,
            record.kind,
            record.stage,
            record.micro_batch,
            record.start_s + offset - start,
            record.end_s + offset - start,
            record.peer,
            float(record.bytes),
        )
        for rank, ((_, records), offset) in enumerate(zip(gathered, offsets, strict=True))
        for record in records
    ]
    events.sort(key=lambda event: (event.start_s, event.device, event.end_s))
    return Timeline(tuple(events), world.size, title=title)


def clock_offsets(world: World, now: Callable[[], float]) -> list[float]:
    """What to add to each rank's clock to have rank 0's."""
    if world.one_host:
        return [0.0] * world.size
    best: tuple[float, list[float]] | None = None
    for _ in range(ALIGNMENT_ROUNDS):
        world.barrier()
        before = now()
        moments = world.gather(now())
        duration = now() - before
        if best is None or duration < best[0]:
            best = (duration, [moments[0] - moment for moment in moments])
    assert best is not None
    return world.from_first(best[1])
