"""Record what happens when on this rank, and gather the records of all ranks as one timeline."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar, get_args

import torch

from penstock.device import Mark, is_gpu, timing_mark, wait_checking, wait_for
from penstock.runtime.processes.heartbeat import HEARTBEAT, CurrentWait
from penstock.runtime.processes.world import World
from penstock.timeline.timeline import Event, EventKind, Timeline

Step = TypeVar("Step")

ALIGNMENT_ROUNDS = 5

AHEAD = 3
"""Actions that the host launches at most before the device has ended the first of them. That
keeps the device busy, and bounds the messages whose memory NCCL holds until the device comes to
them."""

FROM_OTHERS = {"RECV": "a message", "REDUCE": "the gradient sum"}
"""Actions that depend on other ranks, in words."""

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

    def paced(self, steps: Iterable[Step]) -> Iterable[Step]:
        """The steps as they are: the host computes them itself."""
        return steps

    def settle(self) -> None:
        """Wait until all that is launched has ended."""

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

    What the device waits for, the host learns only by waiting for the device. So it does that here,
    in `paced` and `settle`, with the limit of a wait for other ranks; ``check`` is called meanwhile
    and raises if they can no longer be waited for.
    """

    def __init__(self, device: torch.device, check: Callable[[], None] = HEARTBEAT.check) -> None:
        self._device, self._check = device, check
        self._marks: list[Mark] = []
        self._used = self._ended = 0
        super().__init__(self._moment)
        self.start_s = float(self.start_s)

    def restart(self) -> None:
        """Begin an iteration."""
        self._used = self._ended = 0
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

    def paced(self, steps: Iterable[Step]) -> Iterator[Step]:
        """The steps, each when the device has ended the one `AHEAD` steps before."""
        launched = deque[Mark]()
        for step in steps:
            yield step
            if self._used:
                launched.append(self._marks[self._used - 1])
            if len(launched) > AHEAD:
                self._wait_for(launched.popleft())

    def settle(self) -> None:
        """Wait until the device has ended all that is launched."""
        self._moment()
        self._wait_for(self._marks[self._used - 1])

    def _wait_for(self, mark: Mark) -> None:
        """Wait for a mark; raises `Stalled` if the device waits too long for another rank."""
        if mark.query():
            return
        ended = -1

        def check() -> None:
            nonlocal ended
            if self._first_under_way() != ended:
                ended = self._ended
                HEARTBEAT.wait = self._present_wait()
            wait, limit_s = HEARTBEAT.wait, HEARTBEAT.limit_s
            for_others = ended < len(self._records) and self._records[ended][0] in FROM_OTHERS
            if wait and for_others and time.perf_counter() - wait.since_s > limit_s:
                text = f"rank {HEARTBEAT.rank} waited {limit_s:g} s for {wait.what()}"
                raise HEARTBEAT.stalled(text)
            self._check()

        wait_checking(mark, check)
        HEARTBEAT.wait = None

    def _first_under_way(self) -> int:
        """The number of the first record that the device has not ended."""
        while self._ended < len(self._records):
            end = self._records[self._ended][4]
            if isinstance(end, Moment) and not end.mark.query():
                break
            self._ended += 1
        return self._ended

    def _present_wait(self) -> CurrentWait:
        """Return the host's wait from now on: that for which the device waits, or the device."""
        text, peer = "its GPU", -1
        if self._ended < len(self._records):
            kind, stage, micro_batch, _, _, peer, _ = self._records[self._ended]
            of = f" of micro-batch {micro_batch}" if micro_batch >= 0 else ""
            of = f"{of} from rank {peer}" if peer >= 0 else of
            what = FROM_OTHERS.get(kind, f"its GPU to end {kind}")
            text = f"{what}{of} for stage {stage}"
        return CurrentWait(lambda: text, peer, "", time.perf_counter())

    @property
    def records(self) -> list[Record]:
        """All records, in seconds of the host's clock; waits for the device."""
        wait_for(self._device)
        # The device is idle, so this mark happens as soon as it is set.
        reference = timing_mark(self._device)
        now_s = time.perf_counter()
        reference.synchronize()

        def seconds(moment: float) -> float:
            if not isinstance(moment, Moment):
                return moment
            return now_s - moment.mark.elapsed_time(reference) / 1e3

        self._records = [
            (kind, stage, micro_batch, seconds(start), seconds(end), peer, size)
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


def clock_for(device: torch.device, check: Callable[[], None] = HEARTBEAT.check) -> StepClock:
    """A clock that measures the compute of ``device``; see `DeviceClock`."""
    return DeviceClock(device, check) if is_gpu(device) else StepClock()


def gather_timeline(world: World, clock: StepClock, title: str) -> Timeline:
    """The latest iteration of all ranks, with time 0 at its first event; all ranks must call this.

    Ranks of one host share the system's monotonic clock. For ranks of several hosts the offset to
    rank 0 is estimated in a few rounds of gathering. The shortest round bounds the error by half of
    its duration.
    """
    # As rows of numbers, which are sent faster than text.
    rows = [(KINDS.index(record.kind), *record[1:]) for record in clock.records]
    gathered = world.all_gather((clock.start_s, torch.tensor(rows, dtype=torch.float64)))
    offsets = clock_offsets(world, clock.now)
    start = min(start_s + offset for (start_s, _), offset in zip(gathered, offsets, strict=True))
    events = [
        Event(
            rank,
            KINDS[int(kind)],
            int(stage),
            int(micro_batch),
            start_s + offset - start,
            end_s + offset - start,
            int(peer),
            size,
        )
        for rank, ((_, table), offset) in enumerate(zip(gathered, offsets, strict=True))
        for kind, stage, micro_batch, start_s, end_s, peer, size in table.tolist()
    ]
    events.sort(key=lambda event: (event.start_s, event.device, event.end_s))
    return Timeline(tuple(events), world.size, title=title)


def clock_offsets(world: World, now: Callable[[], float]) -> list[float]:
    """The seconds to add to each rank's clock to get rank 0's."""
    if world.one_host:
        return [0.0] * world.size
    rounds: list[tuple[float, list[float]]] = []
    for _ in range(ALIGNMENT_ROUNDS):
        world.barrier()
        before = now()
        moments = world.all_gather(now())
        rounds.append((now() - before, [moments[0] - moment for moment in moments]))
    _, offsets = min(rounds)
    return world.broadcast(offsets)
