"""What each process of a rehearsal runs: the real executor on emulated stages and links.

A rank's messages and sums, which arrive and end no sooner than on the emulated links.

The real transport and the real sums carry the tensors. What is added is only a wait: a message is
taken, and a sum is complete, when the emulated links say so.
"""

import json
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.errors import RunFailed, Stalled
from penstock.plan.ordering import order_of
from penstock.rehearse.emulated_links import shares_cores
from penstock.rehearse.emulated_stage import (
    Computing,
    EmulatedStage,
    Lateness,
    alone,
    stage_times,
    wait_until,
)
from penstock.rehearse.emulated_tensors import (
    EmulatedParameters,
    boundaries_of_crossings,
    holders_of_any,
    parameters_of_rank,
    planned_size,
    program_of,
)
from penstock.rehearse.emulation import Emulation, crossings_of
from penstock.runtime.clock import Record, StepClock
from penstock.runtime.execute import PreparedAction, execute
from penstock.runtime.gradients.buckets import GradientBuckets, GradientSum, make_groups
from penstock.runtime.iteration import places_of
from penstock.runtime.processes.failures import Failures
from penstock.runtime.processes.heartbeat import doing
from penstock.runtime.processes.world import World, join_world
from penstock.runtime.rank_numbers import RankNumbers
from penstock.runtime.rank_stages import RankStages
from penstock.runtime.stages.runner import Tensors
from penstock.runtime.transport.messages import BoundaryTensors, Message, messages_by_rank
from penstock.runtime.transport.transport import Inlet, Transport, open_transport
from penstock.simulate.catalogue import workload_of

__all__ = ["LinkClient", "RankRecord", "rehearse_rank", "rehearse_with"]

MOST_AT_ONCE = 1 << 16
"""Bytes that are read from the server at once."""


class LinkClient:
    """This rank's connection to the `LinkServer`; an answer may take ``limit_s``."""

    def __init__(self, name: str, rank: int, limit_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(f"\0{name}")
        self._limit_s, self._unread = limit_s, b""
        self._messages: dict[int, deque[float]] = {}
        self._sums: dict[str, deque[float]] = {}
        self._works, self._computed_s = 0, inf
        self._say(["rank", rank])

    def message(self, message: Message, size_bytes: float, tensors: int) -> None:
        """A message is ready to be sent."""
        ends = message.sender, message.receiver
        label = message.sender_stage, message.receiver_stage, message.micro_batch
        self._say(["message", *ends, size_bytes, tensors, label, time.perf_counter()])

    def sum(self, key: str, members: Sequence[int], size_bytes: float, stage: int) -> None:
        """This rank's gradients of a bucket are complete."""
        self._say(["sum", key, members, size_bytes, stage, time.perf_counter()])

    def end_of_message(self, source: int) -> float:
        """When the next message of ``source`` has arrived."""
        return self._next(self._messages, source, f"a message of rank {source}")

    def end_of_sum(self, key: str) -> float:
        """When the sum ``key`` is complete."""
        return self._next(self._sums, key, f"the sum {key}")

    def compute(self, begin_s: float, seconds: float, lateness: Lateness) -> float:
        """Wait until this rank has computed on cores that it shares; returns when that was."""
        self._works, self._computed_s = self._works + 1, inf
        self._say(["compute", self._works, seconds, begin_s])
        while (left_s := self._computed_s - time.perf_counter()) > 0:
            answered = self._receive(min(left_s, self._limit_s))
            if not answered and self._computed_s == inf:
                raise Stalled("the rehearsal's shared cores did not answer in time")
        lateness.add(time.perf_counter() - self._computed_s)
        return self._computed_s

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def _say(self, words: list[object]) -> None:
        try:
            self._socket.sendall(json.dumps(words).encode() + b"\n")
        except OSError as cause:
            raise RunFailed("the rehearsal's links have ended before this rank") from cause

    def _next(self, ends: dict, wanted: int | str, what: str) -> float:  # type: ignore[type-arg]
        while not (known := ends.get(wanted)):
            if not self._receive(self._limit_s):
                raise Stalled(f"{what} did not begin on the emulated links in time")
        return known.popleft()

    def _receive(self, within_s: float) -> bool:
        """Take in what the server says, if it says something within these seconds."""
        if not select.select([self._socket], [], [], within_s)[0]:
            return False
        data = self._socket.recv(MOST_AT_ONCE)
        if not data:
            raise RunFailed("the rehearsal's links have ended before this rank")
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            match json.loads(line):
                case ["message", source, end_s]:
                    self._messages.setdefault(source, deque()).append(end_s)
                case ["sum", key, end_s]:
                    self._sums.setdefault(key, deque()).append(end_s)
                case ["compute", number, end_s] if number == self._works:
                    self._computed_s = end_s
                case _:
                    pass
        return True


class HeldBackTransport:
    """A real transport whose messages are held back; see `Transport`.

    ``size_of`` gives a message's planned bytes and its number of tensors.
    """

    def __init__(
        self,
        transport: Transport,
        client: LinkClient,
        size_of: Callable[[Message], tuple[float, int]],
        lateness: Lateness,
    ) -> None:
        self._transport, self._client, self._lateness = transport, client, lateness
        self._size_of = size_of
        self.begin, self.proceed = transport.begin, transport.proceed
        self.position = transport.position
        self.at, self.drain, self.announce = transport.at, transport.drain, transport.announce
        self.share_sums = transport.share_sums
        self.abort, self.close = transport.abort, transport.close

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        """A function that sends the parts of ``message`` and says so."""
        send, client = self._transport.outlet(message), self._client
        size_bytes, tensors = self._size_of(message)

        def outgoing(parts: Sequence[torch.Tensor]) -> None:
            client.message(message, size_bytes, tensors)
            send(parts)

        return outgoing

    def inlet(self, message: Message) -> Inlet:
        """The receiving end of ``message``, which is not here before it would be on the links."""
        inlet = self._transport.inlet(message)

        def wait() -> None:
            inlet.wait()
            wait_until(self._client.end_of_message(message.sender), self._lateness)

        return Inlet(wait, inlet.take)


class HeldBackSum:
    """The real sum of a bucket, which ends no sooner than on the emulated links."""

    def __init__(
        self,
        real: GradientSum,
        client: LinkClient,
        key: str,
        holders: Sequence[int],
        size_bytes: float,
        stage: int,
        lateness: Lateness,
    ) -> None:
        self._real, self._client, self._key, self._lateness = real, client, key, lateness
        self._told = (key, list(holders), size_bytes, stage)

    def start(self) -> None:
        """This rank's gradients are complete."""
        self._client.sum(*self._told)
        self._real.start()

    def wait(self) -> None:
        """Wait until the bucket holds the sum, and would on the emulated links."""
        self._real.wait()
        wait_until(self._client.end_of_sum(self._key), self._lateness)

    def settle(self) -> None:
        """Wait until no other holder reads this rank's gradients."""
        self._real.settle()

    def close(self) -> None:
        """Stop sharing the bucket's memory."""
        self._real.close()


class RankRecord(NamedTuple):
    """What one rank did, by iteration. Times are of `time.perf_counter`, which ranks share.

    ``ready_s`` is when it had joined the others. ``own_bytes`` is the memory that only this process
    uses.
    """

    ready_s: float
    starts_s: tuple[float, ...]
    records: tuple[tuple[Record, ...], ...]
    waits: int
    late_s: float
    own_bytes: int


@dataclass
class RehearsingRank:
    """One rank's part: the runtime's stages, gradient buckets and numbers.

    Weights are updated after every ``per_update`` backwards, in ``step_s`` (0: after the flush).
    """

    emulation: Emulation
    stages: RankStages[EmulatedStage]
    buckets: GradientBuckets
    numbers: RankNumbers
    clock: StepClock
    failures: Failures
    lateness: Lateness
    computing: Computing
    step_s: float
    per_update: int

    @doing("rehearses a step", acts=True)
    def run(self) -> tuple[float, tuple[Record, ...]]:
        """One iteration and its optimizer step; returns when it began, and what was done."""
        self.clock.restart()
        with self.failures.shared():
            self.buckets.zero()
            ready = self.stages.prepared(self.emulation.plan.global_batch, training=True)
            self.stages.take({}, ready.iteration)
            ready.channels.begin()
            execute(self.with_updates(ready.steps), ready.channels, self.clock)
            self.buckets.finish()
            own = self.numbers.own((), (), None, None)
            self.numbers.exchange(own, "the end of the iteration")
        if self.stages.runners and not self.per_update:
            start_s = self.clock.now()
            self.update(-1, ())
            self.clock.add("STEP", min(self.stages.runners), -1, start_s, self.clock.now())
        return self.clock.start_s, tuple(self.clock.records)

    def update(self, micro_batch: int, _: Tensors) -> Tensors:
        """Take the time of an optimizer step."""
        self.computing(time.perf_counter(), self.step_s)
        return ()

    def with_updates(self, steps: Sequence[PreparedAction]) -> Iterator[PreparedAction]:
        """The actions; without a flush, with an optimizer step after each group of backwards."""
        last = "W" if any(step.kind == "W" for step in steps) else "B"
        backwards = 0
        for step in steps:
            yield step
            backwards += step.kind == last
            if self.per_update and step.kind == last and backwards % self.per_update == 0:
                yield PreparedAction("STEP", step.stage, -1, tuple, self.update, None)


def rehearse_rank(emulation: Emulation, server: str, limit_s: float) -> RankRecord:
    """Join the other ranks, and run the plan's iterations on emulated stages and links.

    ``server`` is the name of the `LinkServer`'s socket. ``limit_s`` is how long another rank may
    not answer.

    Raises:
        RunFailed: a rank received what it should not have, or failed.
        Stalled: a rank waited too long.
    """
    client = LinkClient(server, int(os.environ["RANK"]), limit_s)
    return rehearse_with(client, emulation, limit_s)


def rehearse_with(client: LinkClient, emulation: Emulation, limit_s: float) -> RankRecord:
    """`rehearse_rank` with a connection to the server, which is closed."""
    world = join_world("cpu", limit_s)
    rank = rank_of(emulation, world, client)
    world.barrier()
    ready_s = time.perf_counter()
    starts: list[float] = []
    records: list[tuple[Record, ...]] = []
    for _ in range(emulation.iterations):
        start_s, done = rank.run()
        starts.append(start_s)
        records.append(done)
    late = rank.lateness
    own_bytes = own_memory_bytes()
    rank.buckets.close()
    client.close()
    world.leave()
    return RankRecord(
        ready_s,
        tuple(starts),
        tuple(records),
        late.waits,
        late.total_s,
        own_bytes,
    )


def rank_of(emulation: Emulation, world: World, client: LinkClient) -> RehearsingRank:
    """Everything that one rank needs, made once."""
    plan, clock, lateness = emulation.plan, StepClock(), Lateness()
    crossings = crossings_of(plan, emulation.profile)
    by_ends = {(c.producer, c.consumer, c.name): c for c in crossings}
    boundaries = boundaries_of_crossings(crossings, emulation.byte_scale)
    held = tuple(place.stage for place in places_of(plan, world.rank))
    parameters = parameters_of_rank(emulation, held)
    ever = messages_by_rank(plan, world.size, boundaries, (), ())
    real = open_transport(world, emulation.transport, ever)
    transport = None
    if real is not None:
        size_of = partial(planned_size, crossings=by_ends)
        transport = HeldBackTransport(real, client, size_of, lateness)
    groups = make_groups(world, holders_of_any(plan, emulation.profile))
    buckets = GradientBuckets(
        world,
        parameters.of_stage,
        parameters.stages,
        parameters.holders,
        groups,
        clock,
        size_of=lambda parameter: parameters.planned_bytes[parameter],
    )
    hold_back_sums(world, real, buckets, parameters, client, lateness)
    host = emulation.cluster.hosts[emulation.cluster.host_index[world.rank]]
    compute = client.compute if shares_cores(host) else alone
    computing = partial(compute, lateness=lateness)
    schedule = order_of(plan)
    workload = workload_of(plan, emulation.profile, emulation.cluster, schedule)
    work = next((device for device in workload.devices if device.device == world.rank), None)
    programs = {stage: program_of(stage, boundaries, emulation) for stage in held}
    runners: dict[int, EmulatedStage] = {}
    for instance, replica in work.replicas.items() if work is not None else ():
        stage, parts = replica.stage, workload.parts.stages[instance]
        times = stage_times(replica, parts, parameters, emulation.time_scale)
        launching = partial(buckets.launching, stage)
        senders, readers = ends_of_tensors(stage, boundaries)
        runners[stage] = EmulatedStage(
            stage, programs[stage], times, senders, readers, launching, computing
        )
    stages = RankStages(
        plan,
        world,
        transport,
        clock,
        boundaries=boundaries,
        programs=programs,
        runners=runners,
        metrics=None,
    )
    failures = Failures(world, transport.abort if transport is not None else lambda: None)
    numbers = RankNumbers(transport, clock, len(plan.devices))
    step_s = work.step_s * emulation.time_scale if work is not None else 0.0
    return RehearsingRank(
        emulation,
        stages,
        buckets,
        numbers,
        clock,
        failures,
        lateness,
        computing,
        step_s,
        schedule.weights.micro_batches_per_update,
    )


def hold_back_sums(
    world: World,
    real: Transport | None,
    buckets: GradientBuckets,
    parameters: EmulatedParameters,
    client: LinkClient,
    lateness: Lateness,
) -> None:
    """Sum gradients where the runtime would, and end each sum as the emulated links say."""
    if real is not None:
        real.share_sums(buckets.shared)
    numbers: dict[tuple[object, ...], int] = {}
    for bucket in buckets.shared:
        alike = bucket.holders, bucket.stages
        number = numbers[alike] = numbers.get(alike, -1) + 1
        size_bytes = sum(parameters.planned_bytes[p] for p in bucket.parameters)
        key = f"{bucket.stages} {bucket.holders} {number}"
        assert bucket.sum is not None
        bucket.sum = HeldBackSum(
            bucket.sum, client, key, bucket.holders, size_bytes, bucket.stage, lateness
        )


def ends_of_tensors(
    stage: int, boundaries: Sequence[BoundaryTensors]
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """The stage that sends each tensor that ``stage`` reads, and the readers of each it sends."""
    senders: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for boundary in boundaries:
        for spec in boundary.tensors:
            if boundary.consumer == stage:
                senders[spec.name] = boundary.producer
            if boundary.producer == stage:
                readers.setdefault(spec.name, []).append(boundary.consumer)
    return senders, readers


def own_memory_bytes() -> int:
    """The memory that no other process shares (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(kilobytes)
