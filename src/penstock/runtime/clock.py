"""Records what happens when on this rank, and gathers the records of all ranks as one timeline."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, get_args

import torch

from penstock.device import Mark, is_gpu, timing_mark, wait_for
from penstock.runtime.processes.world import World
from penstock.timeline.timeline import Event, EventKind, Timeline

__all__ = ["Clock", "DeviceClock", "Record", "StepClock", "clock_for", "gather_timeline"]

ALIGNMENT_ROUNDS = 5

ON_THE_HOST = ("SEND", "RECV")
"""Events whose times are those of the host, not of the device."""


KINDS: tuple[EventKind, ...] = get_args(EventKind)


class Record(NamedTuple):
    """One event of this rank, in seconds of its clock."""

    kind: EventKind
    stage: int
    micro_batch: int
    start_s: float
    end_s: float
    peer: int = -1
    bytes: int = 0


class Clock(Protocol):
    """Takes the records of the action loop and the channels."""

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
        """Record one event."""
        ...


class StepClock:
    """The records of the latest iteration. ``busy_s`` is its time in compute actions."""

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
        """Continue with another batch; its micro-batches are numbered from ``micro_batches`` on."""
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
        """Record one event."""
        self._records.append((kind, stage, micro_batch, start_s, end_s, peer, bytes))

    @property
    def records(self) -> list[Record]:
        """All records in the order in which they were added, micro-batches numbered throughout."""
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


class Moment(float):
    """A time of the host, with the ``mark`` that the device's stream got at it."""

    mark: Mark


class DeviceClock(StepClock):
    """A `StepClock` whose times are also marks on the current stream of ``device``.

    The host only launches kernels, so its own times do not show when the device computes. A mark
    does not wait. Reading the records waits until all marks have happened. Marks are made once and
    set again in the next iteration.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Mark] = []
        self._used = 0
        super().__init__(self._moment)
        self.start_s = float(self.start_s)

    def restart(self) -> None:
        """Begin an iteration."""
        self._used = 0
        super().restart()
        self.start_s = float(self.start_s)

    def _moment(self) -> float:
        moment = Moment(time.perf_counter())
        if self._used < len(self._marks):
            moment.mark = timing_mark(self._device, self._marks[self._used])
        else:
            moment.mark = timing_mark(self._device)
            self._marks.append(moment.mark)
        self._used += 1
        return moment

    @property
    def records(self) -> list[Record]:
        """All records, in seconds of the host's clock; waits for the device."""
        wait_for(self._device)
        # The device is idle, so this mark happens as soon as it is set.
        reference = timing_mark(self._device)
        now_s = time.perf_counter()
        reference.synchronize()

        def seconds(kind: str, moment: float) -> float:
            if kind in ON_THE_HOST or not isinstance(moment, Moment):
                return float(moment)
            return now_s - moment.mark.elapsed_time(reference) / 1e3

        self._records = [
            (kind, stage, micro_batch, seconds(kind, start), seconds(kind, end), peer, size)
            for kind, stage, micro_batch, start, end, peer, size in self._records
        ]
        return super().records

    @property
    def busy_s(self) -> float:
        """Seconds in which the device computed; waits for the marks."""
        total_s = 0.0
        for kind, _, _, start, end, *_ in self._records:
            if kind not in "FBIWR":
                continue
            if isinstance(start, Moment) and isinstance(end, Moment):
                end.mark.synchronize()
                total_s += start.mark.elapsed_time(end.mark) / 1e3
            else:
                total_s += end - start
        return total_s


def clock_for(device: torch.device) -> StepClock:
    """A clock that measures the compute of ``device``."""
    return DeviceClock(device) if is_gpu(device) else StepClock()


def gather_timeline(world: World, clock: StepClock, title: str) -> Timeline:
    """The latest iteration of all ranks, with time 0 at its first event; all ranks must call this.

    Ranks of one host share the system's monotonic clock. For ranks of several hosts the offset to
    rank 0 is estimated in a few rounds of gathering. The shortest round bounds the error by half of
    its duration.
    """
    gathered = world.all_gather((clock.start_s, as_table(clock.records)))
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
        for rank, ((_, table), offset) in enumerate(zip(gathered, offsets, strict=True))
        for record in from_table(table)
    ]
    events.sort(key=lambda event: (event.start_s, event.device, event.end_s))
    return Timeline(tuple(events), world.size, title=title)


def as_table(records: Sequence[Record]) -> torch.Tensor:
    """Records as rows of numbers, which are sent faster than text."""
    rows = [(KINDS.index(record.kind), *record[1:]) for record in records]
    return torch.tensor(rows, dtype=torch.float64)


def from_table(table: torch.Tensor) -> Iterator[Record]:
    """The records in the rows of `as_table`."""
    for kind, stage, micro_batch, start_s, end_s, peer, size in table.tolist():
        places = int(stage), int(micro_batch)
        yield Record(KINDS[int(kind)], *places, start_s, end_s, int(peer), int(size))


def clock_offsets(world: World, now: Callable[[], float]) -> list[float]:
    """The seconds to add to each rank's clock to get rank 0's."""
    if world.one_host:
        return [0.0] * world.size
    best: tuple[float, list[float]] | None = None
    for _ in range(ALIGNMENT_ROUNDS):
        world.barrier()
        before = now()
        moments = world.all_gather(now())
        duration = now() - before
        if best is None or duration < best[0]:
            best = (duration, [moments[0] - moment for moment in moments])
    assert best is not None
    return world.broadcast(best[1])
