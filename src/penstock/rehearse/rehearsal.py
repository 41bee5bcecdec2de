"""Carries out a plan with one process for each device, and measures what it does.

Tells the ranks of a rehearsal when messages arrive, sums end, and shared cores have computed.

A thread of the launcher hears of every message and every sum from the ranks that take part, plays
them on the emulated links, and answers as soon as a transfer has begun: its end is known then.
Lines of JSON over a local socket go both ways.

    rank  ->  ["rank", 3]
    rank  ->  ["message", source, target, bytes, tensors, [stage, stage, micro-batch], ready]
    rank  ->  ["sum", key, members, bytes, stage, ready]
    rank  <-  ["message", source, end]          to the target
    rank  <-  ["sum", key, end]                 to every member
    rank  ->  ["compute", number, seconds, begin]
    rank  <-  ["compute", number, end]          again whenever another rank changes the end
"""

import asyncio
import json
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from penstock.cluster.cluster import Cluster
from penstock.plan.ordering import order_of
from penstock.rehearse.emulated_links import (
    EmulatedCores,
    EmulatedLinks,
    LinkTransfer,
    Started,
    message_between,
    shares_cores,
    sum_among,
)
from penstock.rehearse.emulation import Emulation, check_can_be_rehearsed
from penstock.rehearse.rehearsing_rank import RankRecord, rehearse_rank
from penstock.runtime.processes.launch import launch_workers
from penstock.schedule.action import Action
from penstock.simulate.catalogue import workload_of
from penstock.simulate.simulation import Prediction, simulate_plan
from penstock.simulate.workload import Workload
from penstock.timeline.metrics import COMPUTE
from penstock.timeline.timeline import Event, Timeline

__all__ = [
    "LinkServer",
    "Rehearsal",
    "Rehearser",
    "chosen_byte_scale",
    "chosen_time_scale",
    "differences",
    "peaks_in_flight",
    "rehearse",
    "serve_links",
    "traffic",
]

PLANNED_S_A_STEP = 60.0
"""Ranks wait for one another at least this long before they say that one does not answer."""

Rehearser: TypeAlias = Callable[[Emulation, str, float], RankRecord]
"""What a process of a rehearsal runs."""


@dataclass(frozen=True)
class Rehearsal:
    """What the ranks did, beside what the simulator predicts for one iteration.

    All seconds are those of the plan: times here divided by the time scale. ``start_s`` is how long
    the processes took to start and to join, in seconds here.
    """

    emulation: Emulation
    prediction: Prediction
    ranks: tuple[RankRecord, ...]
    transfers: tuple[Started, ...]
    start_s: float

    @cached_property
    def ends_s(self) -> tuple[float, ...]:
        """When each iteration ended, after the beginning of the first."""
        ends = [
            max(record.end_s for rank in self.ranks for record in rank.records[k])
            for k in range(self.emulation.iterations)
        ]
        return tuple((end - self.begin_s) / self.emulation.time_scale for end in ends)

    @property
    def begin_s(self) -> float:
        """When the first rank began its first iteration, by the clock of this machine."""
        return min(rank.starts_s[0] for rank in self.ranks)

    @property
    def rehearsed_s(self) -> float:
        """Seconds of an iteration: what each one after the first adds, or the only one."""
        first_s, further = self.ends_s[0], len(self.ends_s) - 1
        return (self.ends_s[-1] - first_s) / further if further else first_s

    @property
    def simulated_s(self) -> float:
        """What the simulator predicts: of one iteration, since ranks agree before each step."""
        return self.prediction.iteration_s

    @property
    def error(self) -> float:
        """How much longer it took than simulated, as a share."""
        return self.rehearsed_s / self.simulated_s - 1

    @property
    def mean_late_s(self) -> float:
        """How late a wait ended on average, in seconds here."""
        return sum(r.late_s for r in self.ranks) / max(1, sum(r.waits for r in self.ranks))

    @property
    def simulated_timeline(self) -> Timeline:
        """The iteration as simulated."""
        return self.prediction.timeline

    @cached_property
    def timeline(self) -> Timeline:
        """The last iteration: compute as the ranks did it, transfers as the links carried them.

        The first one may wait for what happens once, such as connections.
        """
        last = self.emulation.iterations - 1
        scale = self.emulation.time_scale
        begin_s = min(rank.starts_s[last] for rank in self.ranks)

        def planned(moment_s: float) -> float:
            return max(0.0, (moment_s - begin_s) / scale)

        events = [
            Event(rank, r.kind, r.stage, r.micro_batch, planned(r.start_s), planned(r.end_s))
            for rank, record in enumerate(self.ranks)
            for r in record.records[last]
            if r.kind in COMPUTE
        ]
        for started in self.transfers_of(last):
            transfer, span = started.transfer, (planned(started.start_s), planned(started.end_s))
            stage, reader, micro_batch = transfer.label
            if transfer.members:
                events += [
                    Event(member, "REDUCE", stage, -1, *span, bytes=transfer.bytes)
                    for member in transfer.members
                ]
            elif started.end_s > started.start_s:
                ends = transfer.source, transfer.target
                events += [
                    Event(ends[0], "SEND", stage, micro_batch, *span, ends[1], transfer.bytes),
                    Event(ends[1], "RECV", reader, micro_batch, *span, ends[0], transfer.bytes),
                ]
        events.sort(key=lambda event: (event.start_s, event.device, event.end_s))
        return Timeline(tuple(events), len(self.emulation.cluster.devices), title="rehearsed")

    def transfers_of(self, iteration: int) -> list[Started]:
        """The transfers of one iteration; none is ready before all ranks have begun it."""
        begins = [min(r.starts_s[k] for r in self.ranks) for k in range(self.emulation.iterations)]
        begins.append(float("inf"))
        return [t for t in self.transfers if begins[iteration] <= t.ready_s < begins[iteration + 1]]


def rehearse(emulation: Emulation, rank_function: Rehearser = rehearse_rank) -> Rehearsal:
    """Carry out a plan on emulated devices and links.

    ``rank_function`` is what each process runs.

    Raises:
        BadInput: the plan cannot be rehearsed; see `check_can_be_rehearsed`.
        RunFailed: a rank failed, or received what another action had sent.
        Stalled: ranks waited for one another for ever.
        WorkerLost: a rank was lost.
    """
    plan, cluster = emulation.plan, emulation.cluster
    check_can_be_rehearsed(plan, emulation.profile, cluster)
    prediction = simulate_plan(plan, emulation.profile, cluster)
    limit_s = PLANNED_S_A_STEP + 3 * prediction.iteration_s * emulation.time_scale
    server = LinkServer(cluster, emulation.time_scale)
    with serve_links(server) as name:
        begun_s = time.perf_counter()
        arguments = (emulation, name, limit_s)
        ranks = launch_workers(
            rank_function,
            arguments,
            workers=emulation.ranks,
            threads=1,
            imports=(rehearse_rank.__module__,),
        )
    start_s = max(rank.ready_s for rank in ranks) - begun_s
    return Rehearsal(emulation, prediction, ranks, tuple(server.begun), start_s)


@dataclass
class LinkServer:
    """The state of the thread. ``begun`` are all transfers so far, in the order of their starts.

    ``cores`` are those of each host whose devices share them.
    """

    cluster: Cluster
    time_scale: float
    links: EmulatedLinks = field(default_factory=EmulatedLinks)
    begun: list[Started] = field(default_factory=list[Started])
    _ranks: dict[int, asyncio.StreamWriter] = field(default_factory=dict[int, asyncio.StreamWriter])
    _ready: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    _timer: asyncio.TimerHandle | None = None
    cores: dict[int, EmulatedCores] = field(default_factory=dict[int, EmulatedCores])
    _computing: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])

    def __post_init__(self) -> None:
        for index, host in enumerate(self.cluster.hosts):
            if shares_cores(host):
                self.cores[index] = EmulatedCores(host.full_speed_devices)

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what one rank says, until it ends."""
        own = -1
        try:
            while line := await reader.readline():
                match json.loads(line):
                    case ["rank", rank]:
                        own, self._ranks[rank] = rank, writer
                    case ["message", source, target, size_bytes, tensors, label, ready_s]:
                        ends, named = (source, target), (label[0], label[1], label[2])
                        scale = self.time_scale
                        self.offer(
                            message_between(self.cluster, ends, size_bytes, tensors, named, scale),
                            ready_s,
                        )
                    case ["sum", key, members, size_bytes, stage, ready_s]:
                        self._hand_in(key, members, size_bytes, stage, ready_s)
                    case ["compute", number, seconds, begin_s]:
                        self._compute(own, number, seconds, begin_s)
                    case _:
                        pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _compute(self, rank: int, number: int, seconds: float, begin_s: float) -> None:
        """A rank computes; those that share its cores may end at another moment now."""
        cores = self.cores[self.cluster.host_index[rank]]
        self._computing[rank] = number, -1.0
        for other, end_s in cores.begin(rank, seconds, begin_s).items():
            current, told_s = self._computing[other]
            if end_s != told_s:
                self._computing[other] = current, end_s
                self._say(other, ["compute", current, end_s])

    def _hand_in(
        self, key: str, members: Sequence[int], size_bytes: float, stage: int, ready_s: float
    ) -> None:
        """One member's gradients are complete; the sum can begin with the last member's."""
        ready = self._ready.setdefault(key, [])
        ready.append(ready_s)
        if len(ready) == len(members):
            del self._ready[key]
            transfer = sum_among(self.cluster, members, size_bytes, stage, key, self.time_scale)
            self.offer(transfer, max(ready))

    def offer(self, transfer: LinkTransfer, ready_s: float) -> None:
        """A transfer can begin since ``ready_s``; those concerned hear of what begins."""
        self._tell(self.links.offer(transfer, ready_s))
        self._go_on()

    def _go_on(self) -> None:
        """Advance to now, and again when the next transfer ends."""
        self._tell(self.links.advance(time.perf_counter()))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (end_s := self.links.next_end_s) < float("inf"):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, end_s - time.perf_counter()), self._go_on)

    def _tell(self, begun: Sequence[Started]) -> None:
        for started in begun:
            self.begun.append(started)
            transfer = started.transfer
            if transfer.members:
                for member in transfer.members:
                    self._say(member, ["sum", transfer.key, started.end_s])
            else:
                self._say(transfer.target, ["message", transfer.source, started.end_s])

    def _say(self, rank: int, words: list[Any]) -> None:
        writer = self._ranks.get(rank)
        if writer is not None and not writer.is_closing():
            writer.write(json.dumps(words).encode() + b"\n")


@contextmanager
def serve_links(server: LinkServer) -> Iterator[str]:
    """Within, the server runs in a thread; the name of its socket (without a file; Linux)."""
    name = f"penstock-links-{secrets.token_hex(8)}"
    loop = asyncio.new_event_loop()
    listening = threading.Event()

    async def serve() -> None:
        async with await asyncio.start_unix_server(server.hear, path=f"\0{name}"):
            listening.set()
            await asyncio.Event().wait()

    def run() -> None:
        asyncio.set_event_loop(loop)
        task = loop.create_task(serve())
        loop.run_forever()
        # Then the ranks' readers, and the server, end.
        for each in [task, *asyncio.all_tasks(loop)]:
            each.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run, name="penstock-links", daemon=True)
    thread.start()
    listening.wait(10)
    try:
        yield name
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


ROUNDING = 1e-6
"""Bytes may differ by so much of their sum."""


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """What one device sent another in an iteration, and how long any of it was under way."""

    source: int
    target: int
    messages: int
    bytes: float
    busy_s: float


def differences(rehearsal: Rehearsal) -> list[str]:
    """What was done otherwise than the plan says, a line each; the times are not looked at."""
    emulation = rehearsal.emulation
    schedule = order_of(emulation.plan)
    workload = workload_of(emulation.plan, emulation.profile, emulation.cluster, schedule)
    orders = {d.device: tuple(schedule.of(d.group)) for d in workload.devices}
    found: list[str] = []
    for iteration in range(emulation.iterations):
        for rank in range(len(rehearsal.ranks)):
            done = actions_of(rehearsal, rank, iteration)
            found += difference_of_order(rank, iteration, done, orders.get(rank, ()))
        found += list(differences_of_bytes(rehearsal, workload, iteration))
    return found


def actions_of(rehearsal: Rehearsal, rank: int, iteration: int) -> tuple[Action, ...]:
    """What a rank computed in an iteration, in the order in which it did."""
    return tuple(
        Action(record.kind, record.stage, record.micro_batch)
        for record in rehearsal.ranks[rank].records[iteration]
        if record.kind in ("F", "B", "I", "W", "R")
    )


def difference_of_order(
    rank: int, iteration: int, done: Sequence[Action], planned: Sequence[Action]
) -> list[str]:
    """The first action that is not the planned one; empty if there is none."""
    if tuple(done) == tuple(planned):
        return []
    for position, (one, other) in enumerate(zip(done, planned, strict=False)):
        if one != other:
            return [
                f"iteration {iteration}: action {position} of rank {rank} was {one} where the "
                f"schedule has {other}"
            ]
    return [
        f"iteration {iteration}: rank {rank} did {len(done)} actions where the schedule has "
        f"{len(planned)}"
    ]


def differences_of_bytes(rehearsal: Rehearsal, workload: Workload, iteration: int) -> Iterator[str]:
    """Pairs of devices, and sums, with other bytes than the simulator counts."""
    planned: dict[tuple[int, int], float] = defaultdict(float)
    summed: dict[tuple[int, ...], float] = defaultdict(float)
    for message in workload.messages:
        ends = (workload.replicas[end] for end in (message.sender, message.receiver))
        source, target = (workload.devices[end.position].device for end in ends)
        if source != target:
            planned[source, target] += message.bytes * micro_batches_of(workload, message.sender)
    for reduction in workload.reductions:
        held = (workload.replicas[m].position for m in reduction.members)
        devices = tuple(sorted({workload.devices[position].device for position in held}))
        summed[devices] += sum(bucket.bytes for bucket in reduction.buckets)
    sent: dict[tuple[int, int], float] = defaultdict(float)
    reduced: dict[tuple[int, ...], float] = defaultdict(float)
    for started in rehearsal.transfers_of(iteration):
        transfer = started.transfer
        if transfer.members:
            reduced[tuple(sorted(transfer.members))] += transfer.bytes
        else:
            sent[transfer.source, transfer.target] += transfer.bytes
    for pair in sorted(planned.keys() | sent.keys()):
        if abs(planned[pair] - sent[pair]) > ROUNDING * max(planned[pair], sent[pair]):
            yield (
                f"iteration {iteration}: rank {pair[0]} sent rank {pair[1]} {sent[pair]:.0f} bytes "
                f"where the plan has {planned[pair]:.0f}"
            )
    for group in sorted(summed.keys() | reduced.keys()):
        if abs(summed[group] - reduced[group]) > ROUNDING * max(summed[group], reduced[group]):
            yield (
                f"iteration {iteration}: ranks {list(group)} summed {reduced[group]:.0f} bytes of "
                f"gradients where the plan has {summed[group]:.0f}"
            )


def micro_batches_of(workload: Workload, replica: int) -> int:
    """The number of micro-batches that an instance works on: half of them in mirrored pipelines."""
    instances = workload.instances
    if not instances.mirrored:
        return workload.micro_batches
    odd = workload.replicas[replica].instance >= instances.stages
    return (workload.micro_batches + (0 if odd else 1)) // 2


def peak_in_flight(done: Sequence[Action]) -> int:
    """The most micro-batches of any stage between their forward and the end of their backward."""
    counts, ends = Counter[int](), {(a.stage, a.micro_batch) for a in done if a.kind == "W"}
    most = 0
    for action in done:
        last = "W" if (action.stage, action.micro_batch) in ends else "B"
        if action.kind == "F":
            counts[action.stage] += 1
            most = max(most, counts[action.stage])
        elif action.kind == last:
            counts[action.stage] -= 1
    return most


def peaks_in_flight(rehearsal: Rehearsal) -> list[int]:
    """`peak_in_flight` of each rank in the first iteration."""
    return [peak_in_flight(actions_of(rehearsal, rank, 0)) for rank in range(len(rehearsal.ranks))]


def traffic(rehearsal: Rehearsal) -> list[LinkTraffic]:
    """What went from each device to each other in the last iteration, most busy first."""
    scale = rehearsal.emulation.time_scale
    found: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for started in rehearsal.transfers_of(rehearsal.emulation.iterations - 1):
        transfer = started.transfer
        if not transfer.members:
            sums = found[transfer.source, transfer.target]
            sums[0] += 1
            sums[1] += transfer.bytes
            sums[2] += (started.end_s - started.start_s) / scale
    rows = (LinkTraffic(*ends, int(s[0]), s[1], s[2]) for ends, s in found.items())
    return sorted(rows, key=lambda row: -row.busy_s)


EACH_S = 0.015
"""Seconds of a core for each action and each message, of which this machine works a small part."""

SHORTEST_S = 2.0
"""An iteration takes at least this long here, so that single late wake-ups do not count."""

LONGEST_S = 12.0
"""And no longer than this: nobody waits for minutes to see a plan."""

MOST_BYTES = 8 << 20
"""The bytes of an iteration's messages together. Copies of 64 MiB took 1 to 2 % of an iteration."""


def chosen_time_scale(workload: Workload, iteration_s: float, cores: int) -> float:
    """How many seconds one second of the plan takes, at least 1.

    The host's work for an action must be small beside the time in which it happens.
    """
    messages = len(workload.messages) * workload.micro_batches
    wanted_s = (workload.actions + messages) * EACH_S / cores
    least_s = min(LONGEST_S, max(SHORTEST_S, wanted_s))
    return max(1.0, least_s / iteration_s) if iteration_s > 0 else 1.0


def chosen_byte_scale(workload: Workload) -> float:
    """The share of the planned bytes that tensors have, at most 1."""
    sent = sum(message.bytes for message in workload.messages) * workload.micro_batches
    summed = sum(bucket.bytes for r in workload.reductions for bucket in r.buckets)
    return min(1.0, MOST_BYTES / max(1.0, sent + summed))
