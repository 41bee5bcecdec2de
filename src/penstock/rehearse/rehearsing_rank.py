"""What each process of a rehearsal runs: the real executor on emulated stages and links."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.plan.ordering import order_of
from penstock.rehearse.emulated_cores import shares_cores
from penstock.rehearse.emulated_stage import (
    Computing,
    EmulatedStage,
    Lateness,
    alone,
    stage_times,
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
from penstock.rehearse.held_back import HeldBackSum, HeldBackTransport, LinkClient
from penstock.runtime.clock import Record, StepClock
from penstock.runtime.execute import PreparedAction, execute
from penstock.runtime.gradients.buckets import GradientBuckets, make_groups
from penstock.runtime.gradients.shared_memory_sum import share_sums
from penstock.runtime.iteration import places_of
from penstock.runtime.processes.failures import Failures
from penstock.runtime.processes.watch import doing
from penstock.runtime.processes.world import World, join_world
from penstock.runtime.rank_numbers import RankNumbers
from penstock.runtime.rank_stages import RankStages
from penstock.runtime.stages.runner import Tensors
from penstock.runtime.transport.channels import open_transport
from penstock.runtime.transport.messages import BoundaryTensors
from penstock.runtime.transport.possible_messages import messages_by_rank
from penstock.runtime.transport.shared_memory import SharedMemoryTransport
from penstock.runtime.transport.transport import Transport
from penstock.simulate.catalogue import workload_of

__all__ = ["RankRecord", "rehearse_rank", "rehearse_with"]


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
    for iteration in range(emulation.iterations):
        if (world.rank, iteration) == (emulation.killed_rank, emulation.killed_in_iteration):
            os.kill(os.getpid(), signal.SIGKILL)
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
    if isinstance(real, SharedMemoryTransport):
        share_sums(world, real.segments, buckets.shared)
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
